"""What transformers asks of a mask's values in eager mode, asked while a step is captured as well.

Where a mask masks nothing, eager mode leaves it to the attention kernel, which then rounds otherwise than with a mask that is
handed in, and is a faster one. Under Dynamo the library does not look at values, and hands one in: its older releases always,
the newer ones where the user gives a mask. Here it looks, as in eager mode: what it asks of all of a mask is answered while
the step is captured, from the batch that it is captured with, and Dynamo guards on the answer: a batch with another answer is
captured anew. What cannot be answered is answered with no, and a mask is made.

The library also asks whether it is compiled where it would then compute in another way (Mamba's scan, experts' products,
LongT5's mask of ones): the answer is no there. Elsewhere it asks to know what can be traced, and gets Dynamo's own answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.node import map_aggregate

from lightning_remat.capture._torch import (
    Source,
    TensorVariable,
    TorchInGraphFunctionVariable,
    UserFunctionVariable,
    VariableTracker,
    given,
    given_now,
    guard_on,
    real_tensors,
)

_LIBRARIES = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
"""The modules that decide whether there is a mask, for models of all releases; the second is asked by older models."""

_UNDERSTOOD = {
    *("arange", "tensor", "ones", "zeros", "full", "ones_like", "zeros_like"),
    *("to", "bool", "long", "int", "add", "sub", "eq", "ne", "invert", "diff", "cumsum", "pad"),
    *(
        "getitem",
        "lt",
        "gt",
        "le",
        "ge",
        "and",
        "and_",
        "or",
        "or_",
        "logical_and",
        "logical_or",
        "logical_not",
        "unsqueeze",
        "expand",
        "view",
        "reshape",
        "contiguous",
    ),
}
"""What may have been done before the question, to a tensor of the batch or to none: nothing that draws or depends on state."""


_QUESTIONS = {"is_tracing", "is_torchdynamo_compiling", "is_torchdynamo_exporting"}
"""What the modules ask before they look, some of it in each release; the answer is no. (Before torch 2.14 Dynamo would say yes
to the last always, as the library's own note has it.)
"""

_OTHERWISE = ("transformers.integrations.moe", "transformers.integrations.sdpa_attention")
"""Other modules that ask because they compute in another way when compiled."""

_OWN_WAYS = {"associative_scan", "mask_seq_length"}
"""So do functions of models that name one of these: a scan, or the length of a mask of ones that is left out when compiled."""

_LOOKS = "fast_all"
"""How they look, beside ``torch.all``: as a sum that is compared, whose answer is the same."""


@contextlib.contextmanager
def masks_as_in_eager_mode() -> Iterator[None]:
    """While Dynamo traces: whether there is a mask is decided as in eager mode."""
    if not any(name in sys.modules for name in _LIBRARIES):
        yield
        return
    tensor, function = TensorVariable.call_method, UserFunctionVariable.call_function

    def call_method(self: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
        """``tensor.all()``, and all other calls of methods as they are."""
        if name == "all" and not args and not kwargs and _asking(translator) is not None:
            return _answered(translator, self)
        return tensor(self, translator, name, args, kwargs)

    def call_function(self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        """What the modules call of the library's own, and all other functions as they are."""
        name = getattr(self.fn, "__name__", "")
        if name in _QUESTIONS and getattr(self.fn, "__module__", "").startswith("transformers."):
            if _asking(translator) is not None or _computes_otherwise(translator.f_code):
                return VariableTracker.build(translator, False)
        elif name == _LOOKS and vars(_asking(translator) or types).get(name) is self.fn:
            return _answered(translator, *args)
        return function(self, translator, args, kwargs)

    TensorVariable.call_method = call_method  # type: ignore[assignment, method-assign]
    UserFunctionVariable.call_function = call_function  # type: ignore[assignment, method-assign]
    try:
        with _replaced(TorchInGraphFunctionVariable._get_handlers(), {torch.all: _all_function}):
            yield
    finally:
        TensorVariable.call_method = tensor  # type: ignore[method-assign]
        UserFunctionVariable.call_function = function  # type: ignore[method-assign]


@contextlib.contextmanager
def _replaced(entries: dict[Any, Any], new: dict[Any, Any]) -> Iterator[None]:
    before = {key: entries[key] for key in new if key in entries}
    entries.update(new)
    try:
        yield
    finally:
        for key in new.keys() - before.keys():
            del entries[key]
        entries.update(before)


def _all_function(_function: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    """For Dynamo, ``torch.all(...)``: ``None`` leaves it to Dynamo."""
    asked = len(args) == 1 and not kwargs and _asking(translator) is not None
    return _answered(translator, *args) if asked else None


def _asking(translator: Any) -> types.ModuleType | None:
    """Of the modules that decide whether there is a mask, the one in whose code Dynamo is."""
    libraries = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    return next((one for one in libraries if one.__file__ == translator.f_code.co_filename), None)


def _computes_otherwise(code: types.CodeType) -> bool:
    files = [sys.modules[name].__file__ for name in _OTHERWISE if name in sys.modules]
    names = {*code.co_varnames, *code.co_names, *code.co_cellvars, *code.co_freevars}
    return code.co_filename in files or bool(names & _OWN_WAYS)


def _answered(translator: Any, tensor: Any) -> Any:
    """For Dynamo: the answer as a constant, guarded on; no where it cannot be known."""
    node = tensor.as_proxy().node
    sources: set[Source] = set()
    value = value_of(node, sources)
    example = given_now(node.graph, next(iter(sources))) if len(sources) == 1 else None
    if value is None or len(sources) > 1 or (sources and example is None):
        return VariableTracker.build(translator, False)

    def answer(given: torch.Tensor | None) -> bool:
        return bool(torch.all(value.of(given)))

    with real_tensors(), torch.no_grad():
        said = answer(example)
    for source in sources:
        guard_on(source, answer, said, f"whether nothing is masked: {said}")
    return VariableTracker.build(translator, said)


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """What a node is for any tensor that may be given to the step. (Nodes, and the batch at hand, must not be kept.)"""

    of: Callable[[torch.Tensor | None], Any]


def value_of(node: torch.fx.Node, sources: set[Source]) -> Value | None:
    """Of a node, and the tensors given to the step that it depends on; ``None`` for what is not understood.

    What was written to before the question is not: the batch, before the step runs, does not say what it will be then.
    """
    if isinstance(node.meta.get("example_value"), torch.Tensor) and node.meta["example_value"]._version:
        return None
    found = given(node)
    if found is not None:
        source, read = found
        sources.add(source)
        return Value(read)  # type: ignore[arg-type]
    method = node.op == "call_method"
    name = str(node.target) if method else getattr(node.target, "__name__", "")
    name = name.removeprefix("__").removesuffix("__")  # before torch 2.12, of operators
    if not (method or node.op == "call_function") or name not in _UNDERSTOOD:
        return None
    call: Any = getattr(torch.Tensor, name) if method else node.target
    inputs: dict[Any, Value | None] = {one: value_of(one, sources) for one in node.all_input_nodes}
    if None in inputs.values():
        return None

    def as_value(part: Any) -> Any:
        return inputs.get(part, part)

    arguments: Any = map_aggregate((node.args, node.kwargs), as_value)

    def of(given: torch.Tensor | None) -> Any:
        args, kwargs = map_aggregate(arguments, lambda part: part.of(given) if isinstance(part, Value) else part)
        return call(*args, **kwargs)

    return Value(of)
