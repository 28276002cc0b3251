"""Trains and plans in this process on a torch that is not known: ``python -m tests.helpers.unknown_torch GONE|NEW GRAPH``."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pkgutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl  # before the package: it looks at torch's version too
import torch
import torch._dynamo.symbolic_convert
import torch._functorch.aot_autograd
from lightning.fabric import Fabric

if __name__ == "__main__":  # and not where the command line imports it
    importlib.import_module("torch.utils._sympy.interp")
    if sys.argv[1] == "NEW":
        torch.__version__ = "9.0.0"
    else:
        del torch._dynamo.symbolic_convert.TensorifyState
        del torch.autograd._profiler_enabled
        del torch.utils._sympy.interp
        sys.modules["torch.utils._sympy.interp"] = None

import lightning_remat
from lightning_remat import callbacks, strategies
from lightning_remat.cli import main
from tests.helpers.training import Classifier, loader


def warned(run: Callable[[], Any]) -> list[str]:
    """What is said as a `RematWarning` meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in caught if issubclass(one.category, lightning_remat.RematWarning)]


def trained(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Parameters and buffers after two epochs."""
    torch.manual_seed(0)
    module = Classifier()
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
        **options,
    )
    trainer.fit(module, loader())
    return module.state_dict()


def in_fabric(wrap: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    """Parameters and buffers after a few steps of Fabric."""
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    module = Classifier()
    net, optimizer = fabric.setup(module.net, torch.optim.Adam(module.parameters()))
    step = wrap(net)
    for x, y in loader():
        loss = torch.nn.functional.cross_entropy(step(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(value, other[name]) for name, value in one.items())


def report(graph: str) -> dict[str, Any]:
    """What the tests ask for."""
    for package in (lightning_remat, callbacks, strategies):
        for name in package.__all__:
            getattr(package, name)
    rooms = [one.name for one in pkgutil.iter_modules(lightning_remat.__path__) if not one.name.startswith("_")]
    for room in {*rooms} - {"lowering"}:  # which is what is not there
        importlib.import_module(f"lightning_remat.{room}")
    found: dict[str, Any] = {"rooms": rooms}

    kept: dict[str, Any] = {}
    plain = trained({})
    remat = callbacks.RematCallback(budget=0.5, check=True)
    found["callback"] = warned(lambda: kept.update(callback=trained({"callbacks": [remat]})))
    found["strategy"] = warned(lambda: kept.update(strategy=trained({"strategy": "remat"})))
    finder = callbacks.RematBatchSizeFinder(train_dataloader=lambda size: loader(batch_size=size))
    both: list[Any] = [callbacks.RematCallback(budget="1GiB"), finder]
    found["finder"] = warned(lambda: kept.update(finder=trained({"callbacks": both})))
    found["equal"] = all(equal(plain, kept[name]) for name in ("callback", "strategy", "finder"))
    found["plans"] = len(remat.plans)

    found["fabric"] = warned(lambda: kept.update(fabric=in_fabric(lambda net: lightning_remat.rematerialize(net, 0.5))))
    found["fabric equal"] = equal(in_fabric(lambda net: net), kept["fabric"])
    checked: list[Any] = []
    net = torch.nn.Linear(4, 4)
    warned(lambda: checked.append(lightning_remat.check(net, torch.ones(2, 4))))
    found["check"] = checked[0].summary()
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as refused:
        found["plan"] = main(["solve", graph, "--budget", "min"])
        found["capture"] = main(["capture", "tests.helpers.unknown_torch:pair"])
    found["said"], found["refused"] = said.getvalue(), refused.getvalue()
    return found


def pair() -> Any:
    """For the command line."""
    return torch.nn.Linear(4, 4), torch.ones(2, 4)


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[2])))
