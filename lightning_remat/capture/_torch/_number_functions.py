"""Functions of Python numbers that vary, ``math.exp(t)``: nodes of a graph that call these functions themselves.

torch's symbols know a few of them (``torch._sym_cos``); with any other, Dynamo makes constants of its arguments. Here the
result is a symbol of its own, of which nothing is known but how to compute it.

* ``handle_sym_dispatch`` has a graph that is traced record a call, and ``get_proxy_mode`` says whether one is.
* A shape environment's ``create_unspecified_symbol`` makes the symbol, and ``create_symfloatnode`` the number; guards find
  its value as the expression that is its source's name, in which ``__load_module`` imports.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables.builder import TrackedFake, wrap_fx_proxy  # type: ignore[attr-defined]
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.proxy_tensor import get_proxy_mode, handle_sym_dispatch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeGuardPythonPrinter

from lightning_remat.capture._torch._guards import source_name
from lightning_remat.capture._torch._symbols import SYMBOLIC, hint, specialized, symbolic_node
from lightning_remat.capture._torch._variables import is_size


def call(name: str, *numbers: Any) -> float:
    """Call a function by its name (``"math.exp"``); only those of ``math`` are given floats as Python's, others ``np.float64``.

    Returns:
        A Python float.
    """
    return float(_called(name, *numbers))


def _called(name: str, *numbers: Any) -> Any:
    """As `call`, but whatever the function returns."""
    module, _, function = name.rpartition(".")
    given = numbers if module == "math" else [np.float64(one) if type(one) is float else one for one in numbers]
    return getattr(importlib.import_module(module), function)(*given)


def found(name: str, *numbers: Any) -> float:
    """As `call`, for guards: not a number where it raises, which it does again where the step runs."""
    try:
        with np.errstate(all="ignore"):
            return call(name, *numbers)
    except (ArithmeticError, ValueError):
        return math.nan


@functools.cache
def of_numbers(name: str) -> Callable[..., Any]:
    """What stands in a graph for a function that depends on the numbers alone that it is given.

    Args:
        name: of the function, as `call` takes it.
    """

    def called(*numbers: Any) -> Any:
        symbols = [one for one in numbers if isinstance(one, SYMBOLIC)]
        if not symbols:
            return call(name, *numbers)
        if get_proxy_mode() is not None:
            return handle_sym_dispatch(called, numbers, {})
        value = call(name, *map(hint, numbers))
        environment = symbolic_node(symbols[0]).shape_env
        if not math.isfinite(value) or environment.tracked_fakes is None:
            return call(name, *(specialized(one) for one in numbers))
        words = ", ".join(
            [repr(name), *(written(one.node) if isinstance(one, SYMBOLIC) else repr(one) for one in numbers)]
        )
        return opaque(environment, f"__load_module({__name__!r}).found({words})", value)

    called.__name__ = called.__qualname__ = "of_" + name.replace(".", "_")
    return called


def opaque(environment: Any, words: str, value: float) -> torch.SymFloat:
    """A symbolic float of which nothing is known but a value, and how to compute others; the same symbol for the same words.

    Args:
        environment: the shape environment.
        words: a Python expression, as in guards.
        value: what that is now.
    """
    known = vars(environment).setdefault("_lightning_remat_opaque", {})
    if words not in known:
        source = ConstantSource(words)
        symbol = environment.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        number = environment.create_symfloatnode(symbol, hint=value, source=source)
        environment.tracked_fakes.append(TrackedFake(number, source, None))
        known[words] = symbol, source
    symbol, source = known[words]
    number = environment.create_symfloatnode(symbol, hint=value, source=source)
    return cast("torch.SymFloat", number)


def written(node: Any) -> str:
    """The node of a symbolic number as a Python expression, as guards write it."""
    sources = node.shape_env.var_to_sources
    return str(ShapeGuardPythonPrinter(sources, source_name, sources).doprint(node.expr))


def varies(variable: Any) -> bool:
    """While Dynamo traces: whether a variable is a Python number that varies, and no size."""
    known = isinstance(variable, SymNodeVariable) and isinstance(variable.sym_num, SYMBOLIC)
    return known and not is_size(variable)


def called_with(translator: Any, name: str, numbers: Sequence[Any], kind: type = float) -> SymNodeVariable | None:
    """While Dynamo traces: the variable for what a function makes of numbers that vary; ``None`` where it raises.

    Args:
        translator: Dynamo's.
        name: of the function, as `call` takes it.
        numbers: variables of the numbers, one of which varies (`varies`); the others are constants.
        kind: the type of what the function returns; ``None`` is returned where it is another.
    """
    plain = [one.sym_num if isinstance(one, SymNodeVariable) else one.as_python_constant() for one in numbers]
    try:
        with np.errstate(all="ignore"):  # NumPy warns where the step runs
            value = _called(name, *map(hint, plain))
    except (ArithmeticError, TypeError, ValueError, Warning):
        return None  # raised where the step runs
    as_asked = type(value) is kind
    if not as_asked or not math.isfinite(value):
        return None
    proxy = translator.output.create_proxy("call_function", of_numbers(name), *proxy_args_kwargs(list(numbers), {}))
    return cast("SymNodeVariable", wrap_fx_proxy(translator, proxy))


_MATH = {
    *("acosh", "asinh", "atan2", "atanh", "cbrt", "copysign", "degrees", "erf", "erfc", "exp", "exp2", "expm1", "fmod"),
    *("gamma", "hypot", "lgamma", "log", "log10", "log1p", "log2", "pow", "radians", "remainder"),
}
"""Functions of ``math`` that make a float of floats, and that symbols do not know."""


def of_math(variable: Any, own: Callable[..., Any], translator: Any, args: Any, kwargs: Any) -> Any:
    """A call of what Dynamo puts into graphs: of ``math`` with numbers that vary, or as Dynamo has it."""
    function = variable.value
    name = getattr(function, "__name__", "")
    if name not in _MATH or kwargs or getattr(math, name, None) is not function:
        return own(variable, translator, args, kwargs)
    given = [one.realize() for one in args]
    result = None
    if any(map(varies, given)) and all(varies(one) or is_number(one) for one in given):
        result = called_with(translator, f"math.{name}", given)
    return own(variable, translator, args, kwargs) if result is None else result


def is_number(variable: Any) -> bool:
    """While Dynamo traces: whether a variable is a constant number of Python's, and is a number."""
    if not variable.is_python_constant():
        return False
    value = variable.as_python_constant()
    return type(value) in (int, float, bool) and value == value


def holds(translator: Any, comparison: Any, one: Any, other: Any) -> bool:
    """While Dynamo traces: what a comparison of two numbers says, which the graph is guarded on.

    Args:
        translator: Dynamo's.
        comparison: of the ``operator`` module.
        one: the variable of the first number.
        other: that of the second.
    """
    result: Any = BuiltinVariable(comparison).call_function(translator, [one, other], {})
    symbolic = isinstance(result, SymNodeVariable)
    return bool(result.evaluate_expr(translator.output) if symbolic else result.as_python_constant())
