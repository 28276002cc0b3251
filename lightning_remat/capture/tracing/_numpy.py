"""NumPy on plain numbers, computed by NumPy while a step is captured: ``int(np.ceil(size / window)) * window``.

Dynamo traces NumPy's functions as torch's, which round otherwise, or else breaks the graph at every call, and takes
what comes back for a number that may change. But what is made of constants and sizes alone is a constant, and so is
what is made of that: it is computed here, once, by the real functions, and kept as what NumPy returned. Calls that read
tensors, draw random numbers, write to their arguments or to files are left to Dynamo, and run outside of the graph.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from lightning_remat.capture._torch import (
    BaseListVariable,
    BuiltinVariable,
    GetAttrVariable,
    NumpyVariable,
    SymNodeVariable,
    TorchInGraphFunctionVariable,
    VariableBuilder,
    VariableTracker,
    called_with,
    compare_handlers,
    guard_on,
    holds,
    is_number,
    is_size,
    reconstruct_as,
    reconstruct_copy,
    unimplemented,
    varies,
)

_FUNCTIONS = {
    *("all", "allclose", "amax", "amin", "any", "arange", "argmax", "argmin", "argsort", "around", "array"),
    *("array_equal", "asarray", "atleast_1d", "average", "broadcast_to", "ceil", "clip", "concatenate"),
    *("count_nonzero", "cumprod", "cumsum", "diff", "dot", "fix", "flip", "full", "geomspace", "hstack"),
    *("inner", "interp", "isclose", "isscalar", "linspace", "logspace", "max", "mean", "median", "min", "ndim"),
    *("nonzero", "ones", "outer", "prod", "ravel", "repeat", "reshape", "roll", "round", "searchsorted"),
    *("shape", "size", "sort", "squeeze", "stack", "std", "sum", "tile", "transpose", "unique", "var"),
    *("vstack", "where", "zeros"),
}
"""Functions that depend on their arguments alone, as all of NumPy's ufuncs and scalar types do too."""

_METHODS = {
    *("all", "any", "argmax", "argmin", "argsort", "as_integer_ratio", "astype", "clip", "copy", "cumprod"),
    *("cumsum", "dot", "flatten", "is_integer", "item", "max", "mean", "min", "nonzero", "prod", "ravel"),
    *("repeat", "reshape", "round", "squeeze", "std", "sum", "tolist", "transpose", "var"),
}
"""Methods of arrays and of NumPy's scalars that do not write to them."""

_OPERATORS = (
    "abs add and_ eq floordiv ge getitem gt index invert le lt mod mul ne neg not_ or_ pos pow sub truediv truth xor"
)
_BUILTINS = {
    *(abs, bool, complex, divmod, float, int, len, list, max, min, pow, round, sum, tuple),
    *(math.ceil, math.floor, math.sqrt),
    *(getattr(operator, name) for name in _OPERATORS.split()),
}
"""Python's functions that are computed for such constants."""

_IN_PLACE = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
_WRITING = {
    operator.setitem,
    operator.delitem,
    *(getattr(operator, f"i{name}") for name in _IN_PLACE.split()),
}
"""Python's operators that write to an array."""

_COMPARED = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class NumpyConstant(VariableTracker):
    """Dynamo's variable for what NumPy has made of constants.

    Attributes:
        value: an array that nothing writes to while the step is traced, or a NumPy scalar.
    """

    def __init__(self, value: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.value = value

    def python_type(self) -> type:
        return type(self.value)

    def as_python_constant(self) -> Any:
        return self.value

    def is_python_constant(self) -> bool:
        return True

    def as_proxy(self) -> Any:
        if not isinstance(self.value, np.generic):
            raise NotImplementedError("an array of NumPy's in a captured graph")
        return self.value.item()

    def unpack_var_sequence(self, tx: Any) -> list[Any]:
        return [_tracked(tx, item) for item in self.value]

    def tp_iter_impl(self, tx: Any) -> Any:
        return VariableTracker.build(tx, tuple(self.unpack_var_sequence(tx))).tp_iter_impl(tx)

    def var_getattr(self, tx: Any, name: str) -> Any:
        found = getattr(self.value, name)
        return GetAttrVariable(self, name) if callable(found) else _tracked(tx, found)

    tp_getattro_impl = var_getattr  # torch 2.14's name for it

    def call_obj_hasattr(self, tx: Any, name: str) -> Any:
        return VariableTracker.build(tx, hasattr(self.value, name))

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "__iter__":  # how torch 2.12 asks for what `tp_iter_impl` gives
            return VariableTracker.build(tx, tuple(self.unpack_var_sequence(tx))).call_method(tx, name, args, kwargs)
        found = _computed(tx, getattr(self.value, name), args, kwargs) if name in _METHODS else None
        return super().call_method(tx, name, args, kwargs) if found is None else found

    def reconstruct(self, codegen: Any) -> None:
        reconstruct_copy(codegen, self.value)


class NumpyFloat(VariableTracker):
    """Dynamo's variable for a ``np.float64`` that varies: an input of the graph, as a Python float that varies is.

    Attributes:
        number: Dynamo's variable for the float as one of Python's.
    """

    def __init__(self, number: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.number = number

    def python_type(self) -> type:
        return np.float64

    def as_proxy(self) -> Any:
        return self.number.as_proxy()

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        return self.number if name == "item" else super().call_method(tx, name, args, kwargs)

    def var_getattr(self, tx: Any, name: str) -> Any:
        of_any: Any = super()
        own = getattr(of_any, "var_getattr", None) or of_any.tp_getattro_impl
        return GetAttrVariable(self, name) if name == "item" else own(tx, name)

    tp_getattro_impl = var_getattr  # torch 2.14's name for it

    def reconstruct(self, codegen: Any) -> None:
        reconstruct_as(codegen, np.float64, self.number)


def _numbers(args: Any) -> list[Any]:
    return [one.number if isinstance(one, NumpyFloat) else one for one in (arg.realize() for arg in args)]


_AS_OF_FLOATS = {
    *(abs, operator.abs),
    operator.neg,
    operator.pos,
    *(getattr(operator, i + name) for name in ("add", "sub", "mul") for i in ("", "i")),
}
"""Operators for which NumPy gives what Python gives of floats, infinities included."""

_BY_NUMPY: dict[Any, str] = {
    **dict.fromkeys((operator.truediv, operator.itruediv), "operator.truediv"),
    **dict.fromkeys((operator.pow, operator.ipow, pow), "operator.pow"),
    round: "builtins.round",
}
"""Functions for which NumPy gives something else: where NumPy divides by zero, Python raises."""

_BEST: dict[Any, Any] = {min: operator.lt, max: operator.gt}

_QUESTIONS = {
    bool,
    float,
    int,
    *(getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "not_", "truth")),
}


def _of_varying(tx: Any, function: Callable[..., Any], args: Any, own: Callable[..., Any]) -> Any:
    """A call with a `NumpyFloat`, computed as of Python's floats; ``None`` where NumPy may compute otherwise."""
    if function in _BY_NUMPY:
        return _of_numbers(tx, _BY_NUMPY[function], args)
    if function in _BEST and len(args) > 1 and all(_may_vary(one) or is_number(one) for one in args):
        best = args[0]
        for one in args[1:]:
            best = one if holds(tx, _BEST[function], *_numbers([one, best])) else best
        return best
    if function not in _AS_OF_FLOATS and function not in _QUESTIONS:
        return None
    found = own(tx, _numbers(args), {})
    of_numbers = function not in _QUESTIONS and isinstance(found, SymNodeVariable)
    return NumpyFloat(found) if of_numbers else found


def _of_numbers(tx: Any, name: str, args: Any) -> Any:
    """A function of numbers that vary, computed by NumPy when the graph runs; ``None`` where that gives no ``np.float64``."""
    given = [one.realize() for one in args]
    if not any(map(_may_vary, given)) or not all(_may_vary(one) or _are_numbers(one) for one in given):
        return None
    found = called_with(tx, name, _numbers(given), np.float64)
    return None if found is None else NumpyFloat(found)


def _may_vary(one: Any) -> bool:
    return isinstance(one, NumpyFloat) or varies(one)


def _are_numbers(one: Any) -> bool:
    """Whether a constant is a number of Python's, or a list of such."""
    return all(map(is_number, one.items)) if isinstance(one, BaseListVariable) else is_number(one)


@contextlib.contextmanager
def numpy_as_constants() -> Iterator[None]:
    """While Dynamo traces: what NumPy makes of constants is a constant."""
    functions, builtins, handlers = NumpyVariable.call_function, BuiltinVariable.call_function, dict(compare_handlers)
    numbers, of_torch = VariableBuilder.wrap_numpy_ndarray, TorchInGraphFunctionVariable.call_function

    def of_numpy(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        known = _depends_on_arguments_alone(self.value)
        found = _computed(tx, self.value, args, kwargs) if known else None
        if found is None and known and not kwargs:
            found = _of_numbers(tx, f"numpy.{self.value.__name__}", args)
        return functions(self, tx, args, kwargs) if found is None else found

    def of_python(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in _WRITING and isinstance(args[0].realize(), NumpyVariable):
            unimplemented(
                gb_type="an array of NumPy's is written to",
                context=str(self.fn),
                explanation="Dynamo would write to it while it traces, too.",
                hints=[],
            )
        if not kwargs and any(isinstance(one.realize(), NumpyFloat) for one in args):
            found = _of_varying(tx, self.fn, [one.realize() for one in args], functools.partial(builtins, self))
        else:
            found = _of_python(tx, self.fn, args, kwargs)
        return builtins(self, tx, args, kwargs) if found is None else found

    def compared(sign: str, tx: Any, args: Any, kwargs: Any) -> Any:
        found = _of_python(tx, _COMPARED[sign], args, kwargs)
        return handlers[sign](tx, _numbers(args), kwargs) if found is None else found

    def tensors(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value in _TENSORS and "dtype" not in kwargs and any(_holds_number(one.realize()) for one in args):
            name = f"torch.{self.value.__name__}"
            unimplemented(
                gb_type="a tensor of a number of NumPy's",
                context=name,
                explanation=f"{name} of a number of NumPy's has that number's type, and is made outside of the graph.",
                hints=[],
            )
        return of_torch(self, tx, args, kwargs)

    def number(builder: Any, value: np.ndarray) -> Any:
        return (
            _given_number(builder, value[()])
            if value.ndim == 0 and value.dtype.kind in "biufc"
            else numbers(builder, value)
        )

    NumpyVariable.call_function, BuiltinVariable.call_function = of_numpy, of_python  # type: ignore[method-assign]
    VariableBuilder.wrap_numpy_ndarray = number  # type: ignore[method-assign, assignment]
    TorchInGraphFunctionVariable.call_function = tensors  # type: ignore[method-assign]
    compare_handlers.update({sign: functools.partial(compared, sign) for sign in _COMPARED})
    try:
        yield
    finally:
        NumpyVariable.call_function, BuiltinVariable.call_function = functions, builtins  # type: ignore[method-assign]
        VariableBuilder.wrap_numpy_ndarray = numbers  # type: ignore[method-assign]
        TorchInGraphFunctionVariable.call_function = of_torch  # type: ignore[method-assign]
        compare_handlers.update(handlers)


def _given_number(builder: Any, number: Any) -> Any:
    """A NumPy scalar that the step reads: a constant that is guarded on, or a float that varies.

    Dynamo would make a tensor without dimensions of it, which takes part in type promotion: a float32 sum, which has
    none either, times such a float64 tensor is float64.
    """
    if isinstance(number, np.float64) and np.isfinite(number):
        found = builder.wrap_symfloat(float(number))
        if not found.is_python_constant():
            return NumpyFloat(found, source=builder.source)
    guard_on(builder.source, functools.partial(_same, number), True, f"{builder.name} is {number!r}")
    return NumpyConstant(number, source=builder.source)


_TENSORS = {torch.tensor, torch.as_tensor, torch.asarray}


def _holds_number(one: Any) -> bool:
    if isinstance(one, BaseListVariable):
        return any(_holds_number(item.realize()) for item in one.items)
    return isinstance(one, (NumpyConstant, NumpyFloat))


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one.tobytes() == other.tobytes()


def _depends_on_arguments_alone(function: Any) -> bool:
    if isinstance(function, np.ufunc):
        return True
    if isinstance(function, type):
        return issubclass(function, np.generic)
    name = getattr(function, "__name__", "")
    return name in _FUNCTIONS and getattr(np, name, None) is function


def _computed(tx: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Dynamo's variable for the result; ``None`` where not all arguments are constants, or where the call raises."""
    given = [one.realize() for one in (*args, *kwargs.values())]
    if "out" in kwargs or not all(_is_constant(one) for one in given):
        return None
    plain = [_plain(one) for one in given]
    try:
        result = function(*plain[: len(args)], **dict(zip(kwargs, plain[len(args) :], strict=True)))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, Warning):
        return None  # raised where the step runs
    same = [one for one, value in zip(given, plain, strict=True) if value is result and isinstance(one, NumpyConstant)]
    return same[0] if same else _tracked(tx, result)


def _of_python(tx: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    known = function in _BUILTINS and any(isinstance(one, NumpyConstant) for one in args)
    return _computed(tx, function, args, kwargs) if known else None


def _is_constant(one: Any) -> bool:
    if isinstance(one, BaseListVariable):
        return all(_is_constant(item.realize()) for item in one.items)
    if isinstance(one, NumpyVariable):  # an array that the step was given is one too: another in the next step
        return isinstance(one.value, type)
    return is_size(one) or one.is_python_constant()


def _plain(one: Any) -> Any:
    """The value of a constant; a symbolic size becomes one, and is guarded on."""
    if isinstance(one, BaseListVariable):
        made = [_plain(item.realize()) for item in one.items]
        return made if one.python_type() is list else tuple(made)
    return one.evaluate_expr() if is_size(one) else one.as_python_constant()


def _tracked(tx: Any, value: Any) -> Any:
    """Dynamo's variable for a result; ``None`` for one of a kind that it could not go on with."""
    if isinstance(value, (np.generic, np.ndarray)):
        return NumpyConstant(value) if value.dtype.kind in "biufc" else None
    if type(value) in (list, tuple):
        items = [_tracked(tx, item) for item in value]
        return None if None in items else VariableTracker.build(tx, type(value)(items))
    return VariableTracker.build(tx, value) if isinstance(value, _PLAIN) else None


_PLAIN = (int, float, complex, str, np.dtype, type(None))
