"""What transformers asks of a mask's values in eager mode, asked while a step is captured as well.

Where a mask masks nothing, eager mode leaves it to the attention kernel, which then rounds otherwise than with a mask that is
handed in. Under Dynamo the library does not look at values, and hands one in always. Here the question is answered while the
step is captured, from the batch that it is captured with, and Dynamo guards on the answer: a batch with another answer is
captured anew. What cannot be answered is left as the library does it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.node import map_aggregate

from lightning_remat.capture._torch import (
    Source,
    TorchInGraphFunctionVariable,
    VariableTracker,
    given,
    given_now,
    guard_on,
    real_tensors,
)

_LIBRARY = "transformers.masking_utils"

_QUESTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda mask: mask.all(),
    "counts up": lambda positions: (torch.diff(positions, dim=-1) == 1).all(),  # each row is a single sequence
}

_UNDERSTOOD = {
    *("arange", "ones", "zeros", "full", "ones_like", "zeros_like"),
    *("to", "bool", "long", "int", "add", "sub", "getitem", "unsqueeze", "expand", "view", "reshape", "contiguous"),
}
"""What may have been done before the question, to a tensor of the batch or to none: nothing that draws or depends on state."""


@contextlib.contextmanager
def masks_as_in_eager_mode() -> Iterator[None]:
    """The library's functions that decide whether there is a mask, with the question in them asked."""
    library = sys.modules.get(_LIBRARY)
    if library is None:
        yield
        return
    new = _functions(library)
    before = {name: getattr(library, name) for name in new}
    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    inside_another = _asked in handlers
    vars(library).update(new)
    handlers[_asked] = _answered
    try:
        yield
    finally:
        if not inside_another:
            del handlers[_asked]
        vars(library).update(before)


@functools.cache  # the same functions every time: Dynamo guards on them
def _functions(library: Any) -> dict[str, Callable[..., Any]]:
    """By name, what stands for the library's own; none where this release of it has no such function, or none that looks."""
    causal = getattr(library, "_ignore_causal_mask_sdpa", _no)
    both_ways = getattr(library, "_ignore_bidirectional_mask_sdpa", _no)
    packed = getattr(library, "find_packed_sequence_indices", _no)

    def ignore_causal(mask: torch.Tensor | None, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Any:
        ignored = causal(mask, q_length, kv_length, *args, **kwargs)
        if mask is None or not q_length == kv_length == mask.shape[-1]:
            return ignored
        whole = _asked("all", mask) if causal(None, q_length, kv_length, *args, **kwargs) else None
        return ignored if whole is None else whole

    def ignore_both_ways(mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        ignored = both_ways(mask, *args, **kwargs)
        whole = _asked("all", mask) if mask is not None and both_ways(None, *args, **kwargs) else None
        return ignored if whole is None else whole

    def packed_sequences(position_ids: torch.Tensor) -> Any:
        return None if _asked("counts up", position_ids) else packed(position_ids)

    found: dict[str, Callable[..., Any]] = {
        "_ignore_causal_mask_sdpa": ignore_causal,
        "_ignore_bidirectional_mask_sdpa": ignore_both_ways,
        "is_torchdynamo_exporting": _no,  # before torch 2.14 Dynamo says yes always, as the library's own note has it
    }
    if packed is not _no and packed(torch.arange(2)[None]) is None:
        found["find_packed_sequence_indices"] = packed_sequences
    return {name: function for name, function in found.items() if hasattr(library, name)}


def _no(*_args: Any, **_kwargs: Any) -> bool:
    return False


def _asked(question: str, tensor: torch.Tensor) -> bool | None:
    """The answer outside of a capture; inside of one, `_answered` stands for it."""
    return bool(_QUESTIONS[question](tensor))


torch.compiler.allow_in_graph(_asked)  # type: ignore[no-untyped-call]


def _answered(_function: Any, translator: Any, question: Any, tensor: Any) -> Any:
    """For Dynamo: the answer as a constant, guarded on; ``None`` where it cannot be known."""
    ask, node = _QUESTIONS[question.as_python_constant()], tensor.as_proxy().node
    sources: set[Source] = set()
    value = _value(node, sources)
    example = given_now(node.graph, next(iter(sources))) if len(sources) == 1 else None
    if value is None or len(sources) > 1 or (sources and example is None):
        return VariableTracker.build(translator, None)

    def answer(given: torch.Tensor | None) -> bool:
        return bool(ask(value.of(given)))

    with real_tensors(), torch.no_grad():
        said = answer(example)
    for source in sources:
        guard_on(source, answer, said, f"whether a mask is needed: {said}")
    return VariableTracker.build(translator, said)


@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    """What a node is for any tensor that may be given to the step. (Nodes, and the batch at hand, must not be kept.)"""

    of: Callable[[torch.Tensor | None], Any]


def _value(node: torch.fx.Node, sources: set[Source]) -> _Value | None:
    """Of a node, and the tensors given to the step that it depends on; ``None`` for what is not understood.

    What was written to before the question is not: the batch, before the step runs, does not say what it will be then.
    """
    if isinstance(node.meta.get("example_value"), torch.Tensor) and node.meta["example_value"]._version:
        return None
    found = given(node)
    if found is not None:
        source, read = found
        sources.add(source)
        return _Value(read)  # type: ignore[arg-type]
    method = node.op == "call_method"
    name = str(node.target) if method else getattr(node.target, "__name__", "")
    if not (method or node.op == "call_function") or name not in _UNDERSTOOD:
        return None
    call: Any = getattr(torch.Tensor, name) if method else node.target
    inputs: dict[Any, _Value | None] = {one: _value(one, sources) for one in node.all_input_nodes}
    if None in inputs.values():
        return None

    def as_value(part: Any) -> Any:
        return inputs.get(part, part)

    arguments: Any = map_aggregate((node.args, node.kwargs), as_value)

    def of(given: torch.Tensor | None) -> Any:
        args, kwargs = map_aggregate(arguments, lambda part: part.of(given) if isinstance(part, _Value) else part)
        return call(*args, **kwargs)

    return _Value(of)
