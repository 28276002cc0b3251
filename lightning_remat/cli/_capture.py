"""The command ``capture``: calls a user's function for a module and a batch, and captures their graph with costs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_remat._blocks import block_bytes
from lightning_remat.capture import _torch as internals
from lightning_remat.errors import CaptureError, ConfigError, RematError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner import RematConfig, RematWarning, Surroundings
from lightning_remat.runtime import ScheduledStep

Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A module or function, and the arguments of one call."""


def load_factory(spec: str) -> Callable[..., Any]:
    """The function that ``spec`` names: ``package.module:function``, or ``path/to/file.py:function``.

    Modules are looked for in the current folder too, as ``python -m`` does.

    Raises:
        ConfigError: when there is none of that name, or its module cannot be imported.
    """
    place, separator, name = spec.rpartition(":")
    if not (separator and place and name):
        raise ConfigError(f"{spec!r} names no factory: give MODULE:FUNCTION, such as my_package.networks:gpt2")
    try:
        if place.endswith(".py"):
            module = _import_file(Path(place))
        else:
            if "" not in sys.path:
                sys.path.insert(0, "")
            module = importlib.import_module(place)
    except Exception as error:  # whatever the user's module raises when it is imported
        raise ConfigError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ConfigError(f"{place} has no function {name!r}")
    return factory  # type: ignore[no-any-return]


def _import_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # classes look their module up there
    spec.loader.exec_module(module)
    return module


FAKE = " (on fake tensors, which have no values: with --real the network is made with its memory)"


def make_step(factory: Callable[..., Any], arguments: Mapping[str, Any], real: bool) -> Step:
    """What a factory makes, as a callable with its arguments.

    Raises:
        ConfigError: when the factory fails, or returns something else than a pair of a callable and a batch.
    """
    name = getattr(factory, "__name__", str(factory))
    try:
        made = factory(**arguments)
    except Exception as error:  # whatever the user's function raises
        raise ConfigError(f"{name} failed: {type(error).__name__}: {error}{'' if real else FAKE}") from error
    if not (isinstance(made, (tuple, list)) and len(made) == 2 and callable(made[0])):
        raise ConfigError(
            f"{name} returned a {type(made).__name__}: it must return a pair, a module (or a function) and its batch. The "
            "module is called with the batch (a tuple: its items; a dict: its items by name) and returns the loss."
        )
    function, batch = made
    if isinstance(batch, dict):
        return function, (), batch
    return function, tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}


@dataclasses.dataclass(frozen=True)
class Captured:
    """The largest captured graph of a step, and notes on what is not in it."""

    graph: ComputationGraph
    notes: tuple[str, ...]


def captured_graph(
    make: Callable[[], Step],
    *,
    cost_model: str,
    real: bool,
    device: str = "cpu",
    name: str = "",
    old_gradients: bool = True,
    resident_bytes: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Captured:
    """Make a step, run it once, and give back the graph that was captured on the way.

    Args:
        make: makes the step; called while ``device`` is torch's default.
        cost_model: see `lightning_remat.cost.cost_model`.
        real: whether tensors take memory. Without it the step is made and run on fake ones, which have none.
        device: where tensors are made unless the factory says otherwise.
        name: name of the graph; by default that of the function's type.
        old_gradients: whether the gradients of the previous step live through the forward.
        resident_bytes: bytes of what else is held on the device, such as the optimizer's state.
        progress: called with a text about the work in progress.

    Raises:
        ConfigError: for an unknown cost model or device, or a factory that fails.
        CaptureError: when nothing could be captured, or the step itself fails; it says why.
    """
    config = RematConfig(budget=1.0, solver="no_remat", cost_model=cost_model)  # nothing to solve: the graph is wanted
    with contextlib.ExitStack() as stack:
        if not real:
            stack.enter_context(internals.fake_tensors())
        stack.enter_context(on_device(device))
        function, args, kwargs = make()

        def surroundings() -> Surroundings:
            modules = [
                one for one in (function, getattr(function, "__self__", None)) if isinstance(one, torch.nn.Module)
            ]
            parameters = [p for module in modules for p in module.parameters()]
            buffers = [b for module in modules for b in module.buffers()]
            return Surroundings(
                module_bytes=sum(_bytes(one) for one in (*parameters, *buffers)),
                trainable_bytes=sum(_bytes(p) for p in parameters if p.requires_grad),
                resident_bytes=resident_bytes,
                old_gradients=old_gradients,
            )

        def call(
            *given: Any, **named: Any
        ) -> Any:  # a frame outside of torch's own files, where Dynamo captures nothing
            return function(*given, **named)

        name = name or type(function).__name__
        step = ScheduledStep(call, config, surroundings=surroundings, name=name, progress=progress)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RematWarning)  # the notes say it
        try:
            step(*args, **kwargs)
        except RematError:
            raise
        except Exception as error:  # whatever the user's step raises
            raise CaptureError(f"the step failed: {type(error).__name__}: {error}{'' if real else FAKE}") from error
    if not step.plans:
        raise CaptureError(f"{name} could not be captured: {'; '.join(step.failures)}")
    graphs: Sequence[ComputationGraph] = [plan.graph for plan in step.plans]
    graph = max(graphs, key=lambda one: len(one.ops))
    notes = [f"captured as {len(graphs)} graphs; the largest one is saved"] * (len(graphs) > 1)
    return Captured(graph, (*notes, *(f"not captured: {reason}" for reason in step.failures)))


def _bytes(tensor: torch.Tensor) -> int:
    return block_bytes(tensor.nbytes, tensor.device.type)


def on_device(device: str) -> contextlib.AbstractContextManager[Any]:
    """While open, tensors are made on a device unless another is named.

    Raises:
        ConfigError: for a device that cannot be used.
    """
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ConfigError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    return where if where.type != "cpu" else contextlib.nullcontext()
