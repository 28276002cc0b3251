"""What transformers asks of a mask's values in eager mode, asked while a step is captured as well.

Where a mask masks nothing, the library drops it in eager mode: attention without a mask is another kernel, which is
faster and rounds otherwise. Under Dynamo the library does not look at values, and keeps the mask: its older releases
always, the newer ones where the user gives one. Here it looks, as in eager mode: the question whether all of a mask is
true is answered while the step is captured, from the batch that it is captured with, and Dynamo guards on the answer: a
batch with another answer is captured anew. Where the answer cannot be found it is no, and the mask is kept.

The library also asks whether it is compiled where it would then compute in another way (Mamba's scan, experts' products,
LongT5's mask of ones): the answer is no there. Elsewhere it asks to know what can be traced, and gets Dynamo's own answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx.node import map_aggregate

from lightning_remat.capture._torch import (
    Source,
    TensorVariable,
    UserFunctionVariable,
    VariableTracker,
    given,
    given_now,
    guard_on,
    real_tensors,
    replaced_handlers,
    tensor_leaves,
)

_LIBRARIES = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
"""The modules that decide whether there is a mask, for models of all releases; the second is asked by older models."""

_UNDERSTOOD = {
    *("arange", "tensor", "ones", "zeros", "full", "ones_like", "zeros_like", "full_like"),
    *("to", "cpu", "bool", "long", "int", "float", "double", "type_as", "detach", "clone"),
    *("add", "sub", "mul", "div", "truediv", "floordiv", "floor_divide", "mod", "remainder", "neg", "abs"),
    *("floor", "ceil", "round", "clamp", "maximum", "minimum", "where", "masked_fill"),
    *("exp", "log", "sqrt", "sigmoid", "pow", "sym_float", "sym_int", "sym_max", "sym_min"),
    *("sum", "max", "min", "amax", "amin", "mean", "any", "all", "count_nonzero", "cumsum", "argmax", "argmin", "sort"),
    *("eq", "ne", "lt", "gt", "le", "ge", "isnan", "isinf", "isfinite"),
    *("and", "and_", "or", "or_", "xor", "invert", "logical_and", "logical_or", "logical_xor", "logical_not"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
    *("getitem", "select", "narrow", "flatten", "squeeze", "unsqueeze", "expand", "view", "reshape", "contiguous"),
    *("transpose", "permute", "cat", "stack", "diff", "pad", "flip", "roll"),
}
"""Ops by which a value may be computed from tensors of the batch or from constants: none draws random numbers or
depends on state."""


_QUESTIONS = {"is_tracing", "is_torchdynamo_compiling", "is_torchdynamo_exporting"}
"""Functions by which the modules ask whether they are traced, before they look at a mask; the answer is no. Each
release has some of them. (Before torch 2.14 Dynamo always says yes to the last one, as the library's own note has it.)
"""

_OTHERWISE = ("transformers.integrations.moe", "transformers.integrations.sdpa_attention")
"""Other modules that ask because they compute in another way when they are compiled."""

_OWN_WAYS = {"associative_scan", "mask_seq_length"}
"""Names in models' functions that ask for the same reason: a scan, and the length of a mask left out when compiled."""

_LOOKS = "fast_all"
"""The library's own function for ``torch.all``: it compares a sum, and its answer is the same."""


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
        with replaced_handlers({torch.all: _all_function}):
            yield
    finally:
        TensorVariable.call_method = tensor  # type: ignore[method-assign]
        UserFunctionVariable.call_function = function  # type: ignore[method-assign]


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

    def answer(given: Any) -> bool:
        return bool(torch.all(value.of(dict.fromkeys(sources, given))))

    with real_tensors(), torch.no_grad():
        said = answer(example)
    for source in sources:
        guard_on(source, answer, said, f"whether nothing is masked: {said}")
    return VariableTracker.build(translator, said)


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A node's value as a function of what is given to the step, by source; it keeps no node, and no batch, alive."""

    of: Callable[[Mapping[Source, Any]], Any]


def value_of(node: torch.fx.Node, sources: set[Source]) -> Value | None:
    """How a node is computed from what the step is given; ``None`` for a node that is not understood.

    A tensor that was written to before the question is not: the batch as it is before the step does not tell its value.

    Args:
        node: of the graph that Dynamo is capturing.
        sources: what is given to the step and the node depends on is added to these.
    """
    return _value_of(node, sources, _written(node.graph), {})


def _value_of(
    node: torch.fx.Node, sources: set[Source], written: set[int], known: dict[torch.fx.Node, Value | None]
) -> Value | None:
    if node in known:
        return known[node]
    known[node] = None
    example = node.meta.get("example_value")
    if isinstance(example, torch.Tensor) and (example._version or _storage(example) in written):
        return None
    found = given(node)
    if found is not None:
        source, read = found
        sources.add(source)
        known[node] = Value(lambda given: read(given[source]))
        return known[node]
    name = _name(node)
    if not _is_torchs(node) or name not in _UNDERSTOOD:
        return None
    call: Any = getattr(torch.Tensor, name) if node.op == "call_method" else node.target
    inputs: dict[Any, Value | None] = {one: _value_of(one, sources, written, known) for one in node.all_input_nodes}
    if None in inputs.values():
        return None

    def as_value(part: Any) -> Any:
        return inputs.get(part, part)

    arguments: Any = map_aggregate((node.args, node.kwargs), as_value)

    def of(given: Mapping[Source, Any]) -> Any:
        args, kwargs = map_aggregate(arguments, lambda part: part.of(given) if isinstance(part, Value) else part)
        return call(*args, **kwargs)

    known[node] = Value(of)
    return known[node]


def _name(node: torch.fx.Node) -> str:
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name.removeprefix("__").removesuffix("__")  # before torch 2.12, of operators


def _is_torchs(node: torch.fx.Node) -> bool:
    """Whether a node calls a method, or a function of torch's or Python's, and no operator of somebody's own by its name."""
    if node.op == "call_method":
        return True
    if type(node.target).__module__ == "torch._ops":
        return str(node.target).startswith("aten.")
    module = getattr(node.target, "__module__", None) or "torch"
    return node.op == "call_function" and module.partition(".")[0] in {"torch", "_operator", "builtins"}


def _written(graph: torch.fx.Graph) -> set[int]:
    """The memory that may have been written to so far, also where torch counts no version (through ``.data``)."""
    found = set[int]()
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", node.target))
        of_python = getattr(node.target, "__module__", None) == "_operator"  # `and_` writes nothing
        by_name = (name.endswith("_") and not name.endswith("__")) or name.startswith("_foreach")
        in_place = _name(node) in _WRITING or (by_name and not of_python)
        if node.op.startswith("call") and (in_place or "out" in node.kwargs or not _is_torchs(node)):
            for read in node.all_input_nodes:
                found.update(map(_storage, tensor_leaves(read.meta.get("example_value"))))
    return found


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


_WRITING = {
    "setitem",
    *(f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")),
}
"""Python's operators that write."""
