"""Everything from files: Hydra, with a file for each callback.

python examples/hydra/train.py callbacks.remat.budget=min
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
from hydra.utils import instantiate
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1]))
from byte_gpt.train import ByteGPT, Size, StandardLibrary


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: Any) -> None:
    """Train as the files say."""
    L.seed_everything(config.seed)
    size: Size = instantiate(config.size)
    callbacks = [instantiate(one) for one in config.callbacks.values()]
    trainer: L.Trainer = instantiate(config.trainer, callbacks=callbacks)
    trainer.fit(ByteGPT(size), DataLoader(StandardLibrary(size.length), size.batch))
    (remat,) = [one for one in callbacks if hasattr(one, "plans")]
    print(remat.plan.summary())


if __name__ == "__main__":
    main()
