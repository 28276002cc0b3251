"""Every way of running a training step that is compared: each takes a module and returns what to call instead.

Private names of torch are used here, as people have to who try PyTorch's own budget without a code generator.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.comparison.rows import ATEN, CHECKPOINT, EAGER, INDUCTOR, OURS, UNSCHEDULED
from lightning_remat import Rematerialized, rematerialize

MEMORY_BUDGETS = (1.0, 0.5, 0.3, 0.15, 0.05)
"""Values of PyTorch's `activation_memory_budget`."""

Call = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Method:
    """One way of running a step.

    Attributes:
        family: see `benchmarks.comparison.rows`.
        name: the row's name.
        prepare: gets a module, which a peer may change (eager and this project may not), and the names of its blocks; returns
            what is called with the batch, and returns the loss. Capture and planning may wait for the first call.
        budget: the value that was asked for, where there is one.
    """

    family: str
    name: str
    prepare: Callable[[nn.Module, Sequence[str]], Call]
    budget: float | str | None = None


def all_methods(
    budgets: Sequence[float | str],
    memory_budgets: Sequence[float] = MEMORY_BUDGETS,
    inductor_budgets: Sequence[float] = MEMORY_BUDGETS,
    time_limit: float | None = None,
) -> list[Method]:
    """Eager first, then the peers, then this project.

    Args:
        budgets: of this project: shares, sizes or ``"min"``; a row each.
        memory_budgets: values of PyTorch's `activation_memory_budget`; a row each.
        inductor_budgets: those that are tried under Inductor too, which needs a C++ compiler.
        time_limit: of this project's planner, in seconds; by default its own.
    """
    methods = [Method(EAGER, "eager", _eager), Method(CHECKPOINT, "per-block checkpoint", _checkpointed)]
    pytorch = ((_aten, ATEN, "ATen", memory_budgets), (_inductor, INDUCTOR, "Inductor", inductor_budgets))
    for backend, family, said, values in pytorch:
        for value in values:
            prepare = functools.partial(_pytorch_budget, backend=backend, value=value)
            methods.append(Method(family, f"activation_memory_budget {value:g}, {said}", prepare, value))
    for budget in budgets:
        said = f"lightning_remat, {budget if isinstance(budget, str) else f'share {budget:g}'}"
        name = UNSCHEDULED if budget == 1.0 else said
        methods.append(Method(OURS, name, functools.partial(_ours, budget=budget, time_limit=time_limit), budget))
    return methods


def at_bytes(budget_bytes: int, said: str, time_limit: float | None = None) -> Method:
    """This project with a budget of bytes, which ``said`` names."""
    prepare = functools.partial(_ours, budget=budget_bytes, time_limit=time_limit)
    return Method(OURS, f"lightning_remat, at {said}", prepare, budget_bytes)


def _eager(module: nn.Module, _blocks: Sequence[str]) -> Call:
    return module


def _checkpointed(module: nn.Module, blocks: Sequence[str]) -> Call:
    for path in blocks:
        block = module.get_submodule(path)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return module


def _ours(module: nn.Module, _blocks: Sequence[str], budget: float | str, time_limit: float | None) -> Rematerialized:
    options: dict[str, Any] = {} if time_limit is None else {"time_limit": time_limit}
    return rematerialize(module, budget=budget, **options)


# -- PyTorch's own budget ---------------------------------------------------------------------------------------------

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def _pytorch_budget(module: nn.Module, _blocks: Sequence[str], backend: Callable[[], Backend], value: float) -> Call:
    import torch._dynamo
    import torch._functorch.config

    def whole(*batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(*batch)
        return loss

    # A backend object of its own: Dynamo would otherwise run, for an equal module, the code that it made for another value.
    made = backend()
    compiled = torch.compile(whole, backend=lambda graph, inputs: made(graph, inputs), dynamic=False, fullgraph=True)
    captured = False

    def call(*batch: torch.Tensor) -> torch.Tensor:
        nonlocal captured
        if captured:
            return compiled(*batch)
        # The budget is read when the step is captured. All methods capture the same code: raise the limit, past which
        # Dynamo would run it eagerly.
        with (
            torch._functorch.config.patch(activation_memory_budget=value),
            torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000),
        ):
            loss = compiled(*batch)
        captured = True
        return loss

    return call


def _aten() -> Backend:
    """Partition as PyTorch would, and run ATen kernels: what the budget does, without what a code generator does."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.fx.graph import _BoxedCodeGen

    def compiler(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        # Boxed: the arguments come in a list, which is cleared. Otherwise all saved tensors live through the backward.
        module.graph.set_codegen(_BoxedCodeGen())
        module.recompile()
        forward = module.forward

        def run(args: list[Any]) -> Any:
            return forward(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)


def _inductor() -> Backend:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx  # type: ignore[return-value]
