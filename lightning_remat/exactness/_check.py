"""`check`: does a module, planned within a budget, compute what it computes in eager mode?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_remat._rematerialize import rematerialize
from lightning_remat.errors import ConfigError
from lightning_remat.exactness._compare import Runs, compare
from lightning_remat.exactness._outcome import named_tensors
from lightning_remat.exactness._report import CheckReport
from lightning_remat.exactness._state import State


def check(
    module_or_function: torch.nn.Module | Callable[..., Any],
    *batch: Any,
    budget: Any = 0.5,
    named: Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> CheckReport:
    """Compare a step that `rematerialize` has planned with eager mode, bit for bit: outputs, gradients, buffers, random state.

    Eager mode runs twice and, if it repeats its own bits, the planned step at least once, forward and backward, each
    from the same state. Afterwards everything is as before: parameters, buffers, gradients, random generators, the
    modules' Python attributes and the batch. Where bits differ, the report names the first operation that returns other
    ones, its module, and what to set.

    Args:
        module_or_function: as for `rematerialize`.
        *batch: positional arguments that it is called with.
        budget: as for `rematerialize`; by default half of what rematerialization can save.
        named: keyword arguments that it is called with.
        loss: takes the output, and returns the tensor that the backward begins at; by default the backward begins at
            the output's item or attribute ``loss`` where there is one, else at the sum of all outputs that need
            gradients.
        progress: called with a text about the work in progress.
        **options: as for `rematerialize`.

    Returns:
        The report: ``report.equal``, ``report.summary()``, ``report.save(path)``.

    Raises:
        ConfigError: for options that cannot be used, for a function that refers to no module, and where nothing that is
            returned needs gradients.
        BudgetError: for a budget that cannot be understood, or is over what the device has.
        InfeasibleBudgetError: when no schedule fits; it names the smallest feasible budget.
        Exception: whatever the module or function itself raises.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        >>> print(check(net, torch.randn(16, 8)).summary())
        checked: loss and 4 gradients are bit for bit those of eager mode
    """
    step = rematerialize(module_or_function, budget, **options)
    modules = step.modules
    if not modules:
        raise ConfigError(
            f"{module_or_function!r} names no module, and its gradients and buffers could not be compared: give a module, a "
            "method of one, or a function that closes over one"
        )
    keywords = dict(named or {})

    def running(function: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> Any:
            with torch.enable_grad():
                output = function(*batch, **keywords)
                _backward(loss(output) if loss is not None else output)
            return output

        return run

    runs = Runs(
        eager=running(module_or_function),
        planned=running(step),
        scheduled=step.scheduled,
        modules={"": modules[0]} if len(modules) == 1 else {f"{i}": module for i, module in enumerate(modules)},
        state=State(*modules, batch, keywords),
        progress=progress or (lambda _words: None),
    )
    try:
        return compare(runs)
    finally:
        step.close()


def _backward(output: Any) -> None:
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    tensors = [one for _, one in named_tensors(own if isinstance(own, torch.Tensor) else output) if one.requires_grad]
    if not tensors:
        raise ConfigError("nothing that the step returns needs gradients: there is no backward to check")
    torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])
