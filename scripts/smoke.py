"""Whether an installed lightning_remat works: run by the environment that it is installed in, from outside of any source tree.

    /path/to/venv/bin/python -P scripts/smoke.py

All public modules are imported, a small network trains with and without the callback, and the command line runs. If something
is amiss the exit code is 1, and the last line says why.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys
import warnings
from pathlib import Path

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_remat
from lightning_remat.callbacks import RematCallback


class Network(L.LightningModule):
    """Linear layers with dropout, whose activations are most of what a step holds."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6))
        self.layers = nn.Sequential(*layers, nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (x,) = batch
        return (self.layers(x) - x.mean(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trained(*callbacks: RematCallback) -> list[torch.Tensor]:
    """The parameters after a few steps."""
    L.seed_everything(0, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(4 * 512, 64)), batch_size=512)
    network = Network()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    L.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=list(callbacks), **quiet).fit(network, data)
    return [parameter.detach() for parameter in network.parameters()]


def imports() -> str:
    """Every module whose name is public, imported from the environment and nowhere else."""
    home = Path(lightning_remat.__file__).resolve()
    if not home.is_relative_to(Path(sys.prefix).resolve()):
        raise RuntimeError(f"lightning_remat is not that of this environment: {home}")
    found = pkgutil.walk_packages(lightning_remat.__path__, "lightning_remat.")
    names = [one.name for one in found if not any(part.startswith("_") for part in one.name.split("."))]
    for name in names:
        importlib.import_module(name)
    for name in lightning_remat.__all__:
        getattr(lightning_remat, name)
    if not (home.parent / "py.typed").exists():
        raise RuntimeError("py.typed is not installed")
    if importlib.metadata.version("lightning_remat") != lightning_remat.__version__:
        raise RuntimeError("the version that is installed is not the one that the package says")
    return f"{len(names)} modules of lightning_remat {lightning_remat.__version__}"


def training() -> str:
    """Eager's bits within the budget."""
    remat = RematCallback(budget=0.5, time_limit=2)
    planned, plain = trained(remat), trained()
    if remat.plan is None or remat.measured_peak_bytes is None:
        raise RuntimeError("the training step was not planned")
    if not all(map(torch.equal, planned, plain)):
        raise RuntimeError("trained with the callback, the parameters have other bits")
    if remat.measured_peak_bytes > remat.plan.budget_bytes:
        raise RuntimeError(f"{remat.measured_peak_bytes:,} bytes were held of a budget of {remat.plan.budget_bytes:,}")
    return (
        f"{remat.measured_peak_bytes:,} bytes of a budget of {remat.plan.budget_bytes:,}, bits equal, "
        f"{remat.plan.baseline_peak_bytes:,} without"
    )


def command_line() -> str:
    """The installed command, its help and its self-test."""
    command = Path(sys.executable).parent / "lightning-remat"
    for argument in ("--help", "doctor"):
        ended = subprocess.run([command, argument], capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"lightning-remat {argument}: {ended.stdout}{ended.stderr}")
    return "lightning-remat --help, and doctor"


def main() -> int:
    """All of it, a line each."""
    warnings.filterwarnings("ignore", module="lightning")
    for check in (imports, training, command_line):
        try:
            print(f"{check.__name__}: {check()}", flush=True)
        except RuntimeError as error:
            print(f"{check.__name__}: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
