"""Python numbers that change from call to call become inputs of a captured graph, and round and print as Python's do.

* ``VariableBuilder.wrap_symfloat`` and ``wrap_symint``, ``is_int_specialization_case``: Dynamo makes an input of a Python
  number only where all sizes are symbols too, with no way to ask for a single one (see `VaryingNumbers`). AOTAutograd would
  make tensors of such floats, which round otherwise: that is left out (``tensorify_python_scalars``; the environment
  variable that turns it off is read once a process in newer releases, by whoever compiles first). ``TensorifyState`` tells
  Dynamo to begin again with a float as a constant, and ``TensorifyScalarRestartAnalysis`` has it begin again.
* ``SymNodeVariable.as_tensor`` asks modes of the user's.
* ``SymNode`` simplifies what Python rounds at each operation, and ``_format_value`` forgets a float's format: both are
  corrected.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch._dynamo
import torch.fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, unimplemented
from torch._dynamo.source import TensorPropertySource
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase, TensorifyState
from torch._dynamo.variables import builder
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._functorch._aot_autograd import graph_compile
from torch._guards import Source
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.symbol import SymT, symbol_is_type

from lightning_remat._replaced import replaced
from lightning_remat.capture._torch._guards import guard_on, source_name
from lightning_remat.capture._torch._number_functions import holds, of_math, opaque, written
from lightning_remat.capture._torch._symbols import SYMBOLIC, expression, free_symbols, specialized, symbolic_node
from lightning_remat.capture._torch._variables import attribute_of, is_size


class VaryingNumbers:
    """The Python numbers that a function reads and that change from call to call: one graph holds for all of their values.

    A number is one of them once it was seen to change, and from the first call on where it is the result of a call at
    which the graph breaks (``np.random.beta``, ``mask.sum().item()``). Where the size of a tensor follows from one, the graph
    is guarded on that size (`know_sizes`), or, where that cannot be, on the number.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[types.CodeType, str], float] = {}
        self._integers: set[tuple[types.CodeType, str]] = set()
        self._sizes: set[tuple[types.CodeType, str]] = set()

    @contextlib.contextmanager
    def symbolic(self, dynamic_sources: str = "") -> Iterator[None]:
        """While Dynamo traces: these numbers become inputs of the graph.

        Args:
            dynamic_sources: see `tracing`: what Dynamo makes an input of anyway.
        """
        patterns = [re.compile(pattern) for pattern in dynamic_sources.split(",") if pattern]
        own_float, own_integer = VariableBuilder.wrap_symfloat, VariableBuilder.wrap_symint
        own_special = _BUILDER.is_int_specialization_case

        def varies(source: Source, value: float) -> bool:
            key = _key(source)
            return bool(_RETURNED.fullmatch(key[1])) or self._first.setdefault(key, value) != value

        def is_input(source: Source, value: int) -> bool:
            code, name = _key(source)
            known = (code, name) in self._sizes or any(one.match(name) for one in patterns)
            return not known and varies(source, value)

        def wrap_float(building: VariableBuilder, value: float) -> VariableTracker:
            if not torch._dynamo.config.assume_static_by_default or not varies(building.source, value):
                return own_float(building, value)
            return _as_input(building, value, own_float)

        def wrap_integer(
            building: VariableBuilder, value: int, dynamism: Any = None, context: Any = None
        ) -> VariableTracker:
            if dynamism is None and is_input(building.source, value) and _is_ordinary(value):
                self._integers.add(_key(building.source))
                return _as_input(building, value, own_integer)
            return own_integer(building, value, dynamism, context)

        def is_special(value: int, source: Source) -> bool:  # such as all of a module
            return not (source.guard_source.is_unspecialized_nn_module() and is_input(source, value)) and own_special(
                value, source
            )

        replacements = (
            (VariableBuilder, "wrap_symfloat", wrap_float),
            (VariableBuilder, "wrap_symint", wrap_integer),
            (_BUILDER, "is_int_specialization_case", is_special),
            (torch.SymInt, "__round__", _round),
            (torch.SymFloat, "__pow__", _power),
            (BuiltinVariable, "call_function", functools.partialmethod(_called, BuiltinVariable.call_function)),
            (
                TorchInGraphFunctionVariable,
                "call_function",
                functools.partialmethod(of_math, TorchInGraphFunctionVariable.call_function),
            ),
            (SymNodeVariable, "as_tensor", functools.partialmethod(_as_tensor, SymNodeVariable.as_tensor)),
        )
        with replaced(replacements), _rounding_as_python_does(), _formatting_as_python_does():
            yield

    def are_sizes(self, code: types.CodeType | None, names: Sequence[str]) -> bool:
        """Make constants of these integers from now on; returns whether any of them was an input so far.

        Args:
            code: of the frame that is captured.
            names: of their sources.
        """
        found = {(of, name) for of, name in self._integers - self._sizes if of is code and name in names}
        self._sizes |= found
        return bool(found)


def _key(source: Source) -> tuple[types.CodeType, str]:
    """What a number is known by: code of the frame that Dynamo translates, and the source's name."""
    return InstructionTranslator.current_tx().output.root_tx.f_code, source_name(source)


def build_number(translator: Any, owner: Any, name: str) -> VariableTracker:
    """While Dynamo traces: a variable for an attribute of an object, an ``int`` or ``float``, that is an input of the graph."""
    building, value = VariableBuilder(translator, attribute_of(translator, owner, name)), getattr(owner, name)
    own: Any = VariableBuilder.wrap_symint if isinstance(value, int) else VariableBuilder.wrap_symfloat
    known = vars(translator.output).setdefault("_lightning_remat_numbers", {})  # Dynamo keeps a float's tensor alone
    if building.name not in known:
        known[building.name] = _as_input(building, value, own)
    found: VariableTracker = known[building.name]
    return found


def _as_input(building: VariableBuilder, value: float, own: Callable[..., VariableTracker]) -> VariableTracker:
    """Make an input of a number; a constant of one with which symbols do not compute as Python does."""
    ordinary = _is_ordinary(value)
    guard_on(building.source, _is_ordinary, ordinary, "a number with which symbols compute as Python does")
    with torch._dynamo.config.patch(assume_static_by_default=not ordinary, automatic_dynamic_shapes=False):
        return own(building, value, *([DimDynamic.DYNAMIC] if ordinary and isinstance(value, int) else []))


def _as_tensor(variable: Any, own: Callable[..., VariableTracker], translator: Any, *args: Any) -> VariableTracker:
    """A number as a tensor: no mode (as of ``torch.set_default_device``) sees what Python does without a tensor."""
    state = translator.symbolic_torch_function_state
    before, state.torch_function_mode_enabled = state.torch_function_mode_enabled, False
    try:
        return own(variable, translator, *args)
    finally:
        state.torch_function_mode_enabled = before


_OWN_ROUND: Any = torch.SymInt.__round__


def _round(number: torch.SymInt, ndigits: int | None = None) -> Any:
    """``round`` of a symbolic integer: to tens of its value, which must be known."""
    return _OWN_ROUND(number, ndigits) if ndigits is None or ndigits >= 0 else round(int(number), ndigits)


_OWN_POWER: Any = torch.SymFloat.__pow__


def _power(number: torch.SymFloat, exponent: Any) -> Any:
    """``number ** exponent``, also of a negative number, where the exponent is an integer."""
    return number.__float_pow__(exponent) if type(exponent) is int else _OWN_POWER(number, exponent)


_COMPARED: dict[Any, Any] = {min: operator.lt, max: operator.gt}
_PRODUCTS = (operator.mul, operator.imul)


def _called(variable: Any, own: Callable[..., Any], translator: Any, args: Any, kwargs: Any) -> Any:
    """A function of Python's: where it would make another number of symbols than Python does, the graph is guarded on it."""
    given = [one.realize() for one in args] if variable.fn in _COMPARED or variable.fn in _PRODUCTS else []
    known = [one for one in given if type(one) is ConstantVariable and type(one.value) in (int, float)]
    symbols = [one for one in given if isinstance(one, SymNodeVariable)]
    types = {one.python_type() for one in (*known, *symbols)}
    if kwargs or len(given) < 2 or not symbols or len(known) + len(symbols) < len(given) or float not in types:
        return own(variable, translator, args, kwargs)
    if variable.fn in _COMPARED and int in types:  # which is a float then, whichever it is
        best = given[0]
        for one in given[1:]:
            best = one if holds(translator, _COMPARED[variable.fn], one, best) else best
        return best
    if variable.fn in _PRODUCTS and any(one.value == 0 for one in known):  # 0.0 then, whatever the sign
        sign = 1.0 if holds(translator, operator.ge, symbols[0], ConstantVariable.create(0)) else -1.0
        return ConstantVariable.create(known[0].value * sign)
    return own(variable, translator, args, kwargs)


def _is_ordinary(value: Any) -> bool:
    """Whether symbols compute with a number as Python does: not with infinity, -0.0, and what a float cannot hold."""
    if isinstance(value, int):
        return abs(value) <= 1 << sys.float_info.mant_dig
    return abs(value) <= torch.finfo(torch.float32).max and (value != 0 or math.copysign(1, value) > 0)


_BUILDER: Any = builder

_ARITHMETIC = {
    *("add", "sub", "mul", "div", "truediv", "pow", "iadd", "isub", "imul", "itruediv", "ipow", "radd", "rsub", "rmul"),
    *("rtruediv", "rpow", "true_divide"),
}
"""Functions and methods of a tensor and a number."""

_RETURNED = re.compile(r"L\['___stack\d+'\](\[[^\]]*\])*")
"""Dynamo's name for what a call has returned at which the graph breaks, and for items of that."""

_ROUNDED = {"add": "+", "sub": "-", "mul": "*", "float_pow": "**"}


@contextlib.contextmanager
def _rounding_as_python_does() -> Iterator[None]:
    """The arithmetic of symbolic floats is not simplified: ``(t + 1e16) - 1e16`` is not ``t``."""
    own = {name: getattr(SymNode, name) for name in _ROUNDED}
    for name, sign in _ROUNDED.items():
        setattr(SymNode, name, functools.partialmethod(_rounded, own[name], sign))
    try:
        yield
    finally:
        for name, method in own.items():
            setattr(SymNode, name, method)


def _rounded(left: Any, own: Callable[[Any, Any], Any], sign: str, right: Any) -> Any:
    """A result of Python's float arithmetic, as a symbol of its own: its source is an expression, which guards compute.

    Args:
        left: the left operand.
        own: ``SymNode``'s own method for it.
        sign: Python's operator.
        right: the right operand.
    """
    found = own(left, right)
    expression = found.expr
    environment = found.shape_env
    known_before = found.pytype is float and found.hint is not None and math.isfinite(found.hint)
    if not known_before or expression.is_Symbol or expression.is_number or environment.tracked_fakes is None:
        return found
    return symbolic_node(opaque(environment, f"({written(left)} {sign} {written(right)})", found.hint))


@contextlib.contextmanager
def _formatting_as_python_does() -> Iterator[None]:
    """What Dynamo formats when the step runs: a symbolic float, of which it forgets the format, no object of the step's own.

    It would format such an object before it has filled it in: the graph breaks there.
    """
    own = InstructionTranslatorBase._format_value
    typed = "python_type" in vars(StringFormatVariable)  # not in torch 2.11, which breaks the graph for it
    make: Callable[..., VariableTracker] = StringFormatVariable.create
    asks_for_translator = "tx" in inspect.signature(make).parameters  # since torch 2.15

    def format_value(translator: InstructionTranslatorBase, spec: VariableTracker, flags: int) -> None:
        value = translator.stack[-1].realize()
        number = isinstance(value, SymNodeVariable) and isinstance(value.sym_num, (torch.SymFloat, torch.SymInt))
        if number and not is_size(value):  # which may name a layer
            form = "{:" + spec.as_python_constant() + "}"
            first = (translator,) if asks_for_translator else ()
            translator.stack[-1] = make(*first, form, [value], {})
        else:
            own(translator, spec, flags)

    def made(*args: Any, **kwargs: Any) -> VariableTracker:
        values = [one for part in (*args, *kwargs.values()) if isinstance(part, (list, dict)) for one in _values(part)]
        if any(isinstance(one.realize(), UserDefinedObjectVariable) and one.source is None for one in values):
            unimplemented(
                gb_type="formatted object",
                context="",
                explanation="An object that the step has made is formatted: Python does that.",
                hints=[],
            )
        return make(*args, **kwargs)

    own_make = vars(StringFormatVariable)["create"]
    StringFormatVariable.create = made  # type: ignore[method-assign]
    InstructionTranslatorBase._format_value = format_value  # type: ignore[assignment, method-assign]
    if not typed:
        StringFormatVariable.python_type = lambda _: str  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        InstructionTranslatorBase._format_value = own  # type: ignore[method-assign]
        StringFormatVariable.create = own_make  # type: ignore[method-assign]
        if not typed:
            del StringFormatVariable.python_type


def _values(part: list[VariableTracker] | dict[str, VariableTracker]) -> list[VariableTracker]:
    return list(part.values()) if isinstance(part, dict) else part


def _float_symbols(graph_module: torch.fx.GraphModule) -> list[str]:
    """The names of the symbols for Python floats among the inputs of a graph of Dynamo's."""
    return [symbolic_node(number)._expr.name for number in _floats(graph_module)]


def _floats(graph_module: torch.fx.GraphModule) -> list[torch.SymFloat]:
    examples = (node.meta.get("example_value") for node in graph_module.graph.find_nodes(op="placeholder"))
    numbers = (getattr(example, "item_memo", None) for example in examples if isinstance(example, FakeTensor))
    return [number for number in numbers if isinstance(number, torch.SymFloat)]


def floats(graph_module: torch.fx.GraphModule) -> list[str]:
    """Names of the sources of Python floats among the inputs of a graph of Dynamo's."""
    nodes = map(symbolic_node, _floats(graph_module))
    return [source_name(source) for node in nodes for source in node.shape_env.var_to_sources.get(node._expr, ())[:1]]


def sizes_from_floats(graph_module: torch.fx.GraphModule) -> bool:
    """Whether a tensor in a graph of Dynamo's has a size that is computed from a Python float."""
    return any(symbol_is_type(symbol, SymT.FLOAT) for symbol in _in_layouts(graph_module))


def _in_layouts(graph_module: torch.fx.GraphModule) -> set[Any]:
    """The symbols that sizes and strides of tensors in a graph of Dynamo's follow from."""
    return _laid_out([node.meta.get("example_value") for node in graph_module.graph.nodes])


def _laid_out(examples: Any) -> set[Any]:
    """The symbols that sizes and strides of tensors follow from."""
    lie = (
        number
        for one in _tensors(examples)
        for number in (*one.shape, *one.stride())
        if isinstance(number, torch.SymInt)
    )
    return set[Any]().union(*(free_symbols(expression(number)) for number in lie))


def integers(graph_module: torch.fx.GraphModule, sizes: bool) -> list[str]:
    """Names of the sources of Python integers among the inputs of a graph of Dynamo's.

    Args:
        graph_module: the graph.
        sizes: whether only those are asked for that sizes or strides of its tensors follow from.
    """
    examples = (node.meta.get("example_value") for node in graph_module.graph.find_nodes(op="placeholder"))
    symbols = {
        expression(example): source_name(source)
        for example in examples
        if isinstance(example, torch.SymInt) and (source := _python_source(example)) is not None
    }
    found = _in_layouts(graph_module) if sizes and symbols else symbols.keys()
    return [name for symbol, name in symbols.items() if symbol in found]


def know_sizes(graph_module: torch.fx.GraphModule) -> bool:
    """While Dynamo's backend runs: write sizes that are computed from Python's numbers into a graph, which is guarded on them.

    Of a length ``min(512, 64 + 8 * (self.global_step // 1000))`` the graph is guarded on the length, and not on the step.

    Args:
        graph_module: of Dynamo's; it is changed in place, but for the examples in it.

    Returns:
        Whether all were written, so that no size follows from these numbers any more; else nothing was changed.
    """
    laid_out = _in_layouts(graph_module)
    numbers = {symbol for symbol in laid_out if symbol_is_type(symbol, SymT.FLOAT)}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        example = node.meta.get("example_value")
        if isinstance(example, torch.SymInt) and _python_source(example) is not None:
            numbers |= free_symbols(expression(example))
    numbers &= laid_out
    mentioned: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in graph_module.graph.nodes if numbers else ():
        made, *read = (_tensors(one.meta.get("example_value")) for one in (node, *node.all_input_nodes))
        if node.op in ("placeholder", "output") or not (made or any(read)):  # arithmetic of numbers is left
            continue
        of_layout = _laid_out(made) & numbers
        of_integers = of_layout if _is_arithmetic(node) else numbers
        given = [
            one for one in node.all_input_nodes if _symbols(one) & (of_integers if _is_integer(one) else of_layout)
        ]
        if not given:  # as its tensors have them
            continue
        if isinstance(node.target, HigherOrderOperator) or any(_symbols(one) - numbers for one in given):
            return False
        mentioned[node] = given
    values = {one: specialized(one.meta["example_value"]) for given in mentioned.values() for one in given}
    for node in mentioned:
        node.args, node.kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: values.get(one, one))
    if mentioned:
        graph_module.recompile()
    return True


def _tensors(examples: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(examples) if isinstance(one, torch.Tensor)]


def _is_integer(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.SymInt)


def _is_arithmetic(node: torch.fx.Node) -> bool:
    """Whether a node's numbers are operands, of which no size follows."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.strip("_") in _ARITHMETIC


def _symbols(node: torch.fx.Node) -> set[Any]:
    """The symbols in a node that is a number."""
    example = node.meta.get("example_value")
    return free_symbols(expression(example)) if isinstance(example, SYMBOLIC) else set()


def is_size_of_tensor(value: Any) -> bool:
    """Whether an input of a graph of Dynamo's is a symbolic size of a tensor."""
    return isinstance(value, torch.SymInt) and _python_source(value) is None


def _python_source(number: torch.SymInt) -> Source | None:
    """Where a symbolic number comes from; ``None`` for a size of a tensor."""
    sources = symbolic_node(number).shape_env.var_to_sources.get(expression(number), ())
    return sources[0] if sources and not isinstance(sources[0], TensorPropertySource) else None


def trace_again() -> NoReturn:
    """While Dynamo's backend runs: have the frame traced once more, not in the same steps: known modules are left out."""
    InstructionTranslator.current_tx().speculation_log.clear()
    raise TensorifyScalarRestartAnalysis


def floats_as_constants(graph_module: torch.fx.GraphModule) -> None:
    """While Dynamo's backend runs: have the frame captured once more with its Python floats as constants, if it has any left.

    Raises:
        TensorifyScalarRestartAnalysis: in that case; Dynamo must get it.
    """
    names = [name for name in _float_symbols(graph_module) if not TensorifyState.should_specialize(name)]
    for name in names:
        TensorifyState.specialize(name)
    if names:
        trace_again()
    TensorifyState.clear()


@contextlib.contextmanager
def floats_stay() -> Iterator[None]:
    """Python floats enter ops as they do in eager mode, in double precision, and are not made tensors of the result's type."""
    own = graph_compile.tensorify_python_scalars  # type: ignore[attr-defined]
    graph_compile.tensorify_python_scalars = lambda *_: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        graph_compile.tensorify_python_scalars = own  # type: ignore[attr-defined]
