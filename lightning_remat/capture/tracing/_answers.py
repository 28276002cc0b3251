"""What Python asks of values in the batch, while Dynamo traces: ``if mask.any():``, ``ids[:, : lengths.max()]``, ``.item()``.

The graph would break there. What is asked is computed before the step (see ``_early``) where it is known then: Dynamo guards on
an answer that is yes or no, and a number is an input of the graph.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch

from lightning_remat._replaced import replaced
from lightning_remat.capture._torch import BuiltinVariable, TensorVariable, VariableTracker, jumps_decided
from lightning_remat.capture.tracing._early import Early

_KINDS: dict[Any, type] = {
    bool: bool,
    operator.truth: bool,
    operator.not_: bool,
    int: int,
    operator.index: int,
    float: float,
}


@contextlib.contextmanager
def answers_are_found(early: Early) -> Iterator[None]:
    """While Dynamo traces: questions about values that are known before the step are answered."""
    method, builtin = TensorVariable.call_method, BuiltinVariable.call_function

    def of_tensor(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        found = _read(early, tx, variable) if name == "item" and not args and not kwargs else None
        return method(variable, tx, name, args, kwargs) if found is None else found

    def of_python(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        asked = args[0].realize() if variable.fn in _KINDS and len(args) == 1 and not kwargs else None
        if asked is None or not asked.is_tensor() or not early.traced(tx):
            return builtin(variable, tx, args, kwargs)
        index = variable.fn is operator.index and not _is_whole(asked)  # which raises
        found = None if index else _found(early, tx, asked, _KINDS[variable.fn])
        if found is None:
            return builtin(variable, tx, args, kwargs)
        return VariableTracker.build(tx, not found.as_python_constant()) if variable.fn is operator.not_ else found

    def decided(tx: Any, variable: Any) -> bool | None:
        return early.answer(tx, variable) if early.traced(tx) else None

    replacements = ((TensorVariable, "call_method", of_tensor), (BuiltinVariable, "call_function", of_python))
    with replaced(replacements), jumps_decided(decided):
        yield


def _is_whole(tensor: Any) -> bool:
    example = tensor.as_proxy().node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and not (example.is_floating_point() or example.is_complex())


def _read(early: Early, tx: Any, tensor: Any) -> Any:
    example = tensor.as_proxy().node.meta.get("example_value")
    if not early.traced(tx) or not isinstance(example, torch.Tensor) or example.is_complex():
        return None
    kind = bool if example.dtype == torch.bool else float if example.is_floating_point() else int
    return _found(early, tx, tensor, kind)


def _found(early: Early, tx: Any, tensor: Any, kind: type) -> Any:
    if kind is not bool:
        return early.number(tx, tensor, kind)
    answer = early.answer(tx, tensor)
    return None if answer is None else VariableTracker.build(tx, answer)
