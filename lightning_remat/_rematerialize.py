"""`rematerialize`: a module or a function that trains in less memory, for plain PyTorch and Fabric."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_remat.errors import ConfigError
from lightning_remat.measure import held_bytes
from lightning_remat.planner import Plan, RematConfig, Surroundings, with_shards
from lightning_remat.runtime import ScheduledStep, modules_of


class Rematerialized:
    """What `rematerialize` returns: call it in the place of the module or function that it was made from.

    Attributes:
        original: that module or function.
    """

    def __init__(
        self, step: ScheduledStep, original: Callable[..., Any], again: Callable[[Any], Rematerialized]
    ) -> None:
        self._step = step
        self._again, self._looked_at = again, 0  # plans that were there when what is left out was looked for
        self.original = original
        functools.update_wrapper(self, original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._step(*args, **kwargs)
        if self._looked_at < len(self._step.plans):
            self._looked_at = len(self._step.plans)
            if not self._step.failures:  # else it was said what runs as before
                self._step.tell_left_out(self._step.left_out_of(result, (args, kwargs), self.modules))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Rematerialized:
        """The same around a copy of the module, which is captured and planned on its own first call."""
        return self._again(copy.deepcopy(self.original, memo))

    def close(self) -> None:
        """End the search in the background, and put the CUDA allocator's settings back; the plans made so far stay."""
        self._step.close()

    @property
    def scheduled(self) -> ScheduledStep:
        """The step that captures, plans and runs `original`."""
        return self._step

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """The modules that `original` is, is a method of, or refers to in its closure and globals."""
        return tuple(modules_of(self.original))

    @property
    def plan(self) -> Plan | None:
        """The plan that the last call ran; ``None`` before the first call, and where nothing could be captured."""
        return self._step.last_plan

    @property
    def plans(self) -> Sequence[Plan]:
        """All plans, in the order they were made; usually one for each captured graph and set of input shapes."""
        return tuple(self._step.plans)

    @property
    def runs(self) -> Sequence[int]:
        """How often the forward of each of `plans` has run."""
        return tuple(self._step.runs)

    @property
    def failures(self) -> Sequence[str]:
        """Why something could not be captured; empty where all of it was."""
        return tuple(self._step.failures)

    def __repr__(self) -> str:
        return f"rematerialize({self.original!r}, budget={self._step.config.budget!r})"


def _main_device(modules: Sequence[torch.nn.Module]) -> torch.device | None:
    """Where most of the modules' bytes are; ``None`` where they hold none."""
    devices = {p.device for module in modules for p in (*module.parameters(), *module.buffers())}
    return max(devices, key=lambda device: held_bytes(*modules, device=device), default=None)


def rematerialize(
    module_or_function: torch.nn.Module | Callable[..., Any],
    budget: Any = "auto",
    *,
    old_gradients: bool = True,
    accumulating: bool = False,
    resident_bytes: int = 0,
    **options: Any,
) -> Rematerialized:
    """Run a module's forward, or a function, within a memory budget, with the same results bit for bit.

    The step is captured and planned on its first call, and again for new input shapes. The module itself is not
    changed: call what is returned instead of it. What cannot be captured runs as before, and a `RematWarning` says why.
    Compute the loss inside where you can: what is computed outside is not scheduled, and counts in the budget only once
    its memory was measured (in the second call, where that is possible).

    Args:
        module_or_function: a module, or a function of tensors (nested in containers or not) that may call modules.
        budget: ``"auto"`` (what the device has), ``"min"`` (the smallest feasible), bytes, a size such as ``"600MiB"``,
            or a share in (0, 1] of what rematerialization can save (``floor + share * (baseline - floor)``, see
            `Budget.resolve`). It counts parameters, buffers, inputs, gradients, activations and workspaces, but not the
            optimizer's state, which this function does not know: give its size as ``resident_bytes``.
        old_gradients: whether the gradients of the previous step are still there while the forward runs (``zero_grad``
            comes after the forward, as in Lightning, or not at all); ``False`` where they are dropped before.
        accumulating: whether they are still there in the backward, too, where the new ones are added to them: several backwards
            before a ``zero_grad``, or ``zero_grad(set_to_none=False)``. Both are counted then.
        resident_bytes: bytes that something else (an optimizer's state, say) holds on the device; they count in the
            budget.
        **options: fields of `RematConfig`: ``solver``, ``time_limit``, ``solver_options``, ``cost_model``, ``margin``,
            ``background``, ``allocator``, ``tiling``, ``fuse``, ``cuda_graphs``, ``offload``, ``host_budget``.

    Returns:
        A callable with the same signature, and with ``plan``, ``plans``, ``runs``, ``failures`` and ``close()``.

    Raises:
        ConfigError, BudgetError: at once, for options that cannot be used.
        BudgetError: on a call, for a size over what the device has.
        InfeasibleBudgetError: on a call, when no schedule fits; it names the smallest feasible budget.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        >>> step = rematerialize(net, budget="min")
        >>> step(torch.randn(16, 8)).sum().backward()
        >>> step.plan.predicted_peak_bytes <= step.plan.budget_bytes
        True
    """
    if not callable(module_or_function):
        raise ConfigError(f"rematerialize takes a module or a function, not {type(module_or_function).__name__}")
    config = RematConfig.from_mapping({"budget": budget, **options})
    if isinstance(module_or_function, torch.nn.Module):
        # A plain function around the call: `Sequential.forward` is in torch's own files, which Dynamo skips, and hooks
        # would be lost.
        module = module_or_function

        def function(*args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs)

        function.__code__ = function.__code__.replace()  # Dynamo keeps what it captures, and what it skips, by code
        name = type(module).__name__
    else:
        function = module_or_function
        name = getattr(function, "__qualname__", type(function).__name__)

    modules = modules_of(module_or_function)

    def surroundings() -> Surroundings:
        trainable = [p for module in modules for p in module.parameters() if p.requires_grad]
        device = _main_device(modules)
        around = Surroundings(
            module_bytes=held_bytes(*modules, device=device),
            trainable_bytes=held_bytes(trainable, device=device),
            resident_bytes=resident_bytes,
            named_bytes=resident_bytes,
            old_gradients=old_gradients or accumulating,
            accumulating=accumulating,
            held_bytes=held_bytes(*modules, gradients=True, device=device),
        )
        return with_shards(around, modules, device)

    step = ScheduledStep(function, config, surroundings=surroundings, name=name, shared=True)
    again = functools.partial(
        rematerialize,
        budget=budget,
        old_gradients=old_gradients,
        accumulating=accumulating,
        resident_bytes=resident_bytes,
        **options,
    )
    return Rematerialized(step, module_or_function, again)
