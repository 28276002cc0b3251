"""What the user has compiled with ``torch.compile`` and calls in a step runs as the user has compiled it.

Dynamo would trace through it, as if it had not been compiled: another compiler would run in the place of the user's, with other
bits and another speed. So the graph breaks at such a call, which Python makes as it always would, and the graphs around
it are planned. Four things can be compiled: modules (``torch.compile(module)``, ``module.compile()``), functions, and
methods of a class. Functions that ``torch.jit.script`` has made stay likewise: Dynamo would trace what they were made of.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_remat.capture._torch import (
    COMPILED_CALL,
    DISABLED,
    INLINED,
    ORIGINAL,
    AttrSource,
    OptimizedModule,
    SkipFunctionVariable,
    UnspecializedNNModuleVariable,
    UserFunctionVariable,
    VariableBuilder,
    VariableTracker,
    absent,
    unimplemented,
)

Told = Callable[[Any], None]


def is_compiled(function: Any) -> bool:
    """Whether a function or a method was compiled with ``torch.compile``."""
    attributes = getattr(getattr(function, "__func__", function), "__dict__", {})
    return INLINED in attributes and ORIGINAL in attributes


@contextlib.contextmanager
def compiled_stays(told: Told) -> Iterator[None]:
    """While Dynamo traces: calls of what was compiled are left to Python. ``told`` is given each such module and function."""
    hidden: dict[int, tuple[types.FunctionType, Any]] = {}
    kinds: set[type] = set()

    def hide(value: Any) -> None:
        """Mark the compiled functions of an object as disabled, so that Dynamo does not trace into them."""
        methods = _compiled_methods(type(value)) if type(value) not in kinds else []
        kinds.add(type(value))
        # torch 2.11 reads a module's attributes itself, and takes what a compiled function was made of in its place.
        own = isinstance(value, torch.nn.Module) and not isinstance(value, OptimizedModule)
        attributes = vars(value).values() if own else ()
        for function in [getattr(value, "__func__", value), *methods, *attributes]:
            if isinstance(function, types.FunctionType) and is_compiled(function):
                marks = vars(function)
                hidden[id(function)] = function, marks.pop(INLINED)
                marks[DISABLED] = True

    def build(builder: Any, value: Any) -> Any:
        hide(value)
        if isinstance(value, OptimizedModule) and not _is_disabled(value):
            return CompiledModule(value, told, source=builder.source)
        if isinstance(value, torch.jit.ScriptFunction):
            return ScriptedFunction(source=builder.source)
        return own_build(builder, value)

    def call_module(variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        if vars(variable.value).get(COMPILED_CALL) is not None:
            leave(told, variable.value)
        elif variable.source is not None and COMPILED_CALL not in vars(variable.value):
            absent(variable.source, COMPILED_CALL)
        return own_call_module(variable, translator, args, kwargs)

    def call_skipped(variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        if id(variable.value) in hidden:
            leave(told, variable.value)
        return own_call_skipped(variable, translator, args, kwargs)

    def call_function(variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        if id(variable.fn) in hidden:
            leave(told, variable.fn)
        return own_call_function(variable, translator, args, kwargs)

    own_build, own_call_module = VariableBuilder._wrap, UnspecializedNNModuleVariable.call_function
    own_call_skipped, own_call_function = SkipFunctionVariable.call_function, UserFunctionVariable.call_function
    VariableBuilder._wrap = build  # type: ignore[assignment, method-assign]
    UnspecializedNNModuleVariable.call_function = call_module  # type: ignore[assignment, method-assign]
    SkipFunctionVariable.call_function = call_skipped  # type: ignore[assignment, method-assign]
    UserFunctionVariable.call_function = call_function  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        VariableBuilder._wrap = own_build  # type: ignore[method-assign]
        UnspecializedNNModuleVariable.call_function = own_call_module  # type: ignore[method-assign]
        SkipFunctionVariable.call_function = own_call_skipped  # type: ignore[method-assign]
        UserFunctionVariable.call_function = own_call_function  # type: ignore[method-assign]
        for function, inline in hidden.values():
            vars(function)[INLINED] = inline
            del vars(function)[DISABLED]


class CompiledModule(VariableTracker):
    """Dynamo's variable for a module that ``torch.compile`` has returned: it is read as the module, and not traced."""

    _nonvar_fields = VariableTracker._nonvar_fields | {"module", "told"}
    source: Any

    def __init__(self, module: Any, told: Told, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.told = module, told

    def python_type(self) -> type:
        return OptimizedModule

    def tp_getattro_impl(self, tx: Any, name: str) -> Any:
        """An attribute, as torch 2.14 asks for it."""
        if name == "forward":
            return CompiledModule(self.module, self.told, source=AttrSource(self.source, name))
        original = VariableTracker.build(tx, self.module._orig_mod, AttrSource(self.source, "_orig_mod"))
        if name == "_orig_mod":
            return original
        return VariableTracker.build(tx, getattr).call_function(tx, [original, VariableTracker.build(tx, name)], {})

    def var_getattr(self, tx: Any, name: str) -> Any:
        """The same, as earlier releases ask for it."""
        return self.tp_getattro_impl(tx, name)

    def call_obj_hasattr(self, tx: Any, name: str) -> Any:
        return self.tp_getattro_impl(tx, "_orig_mod").call_obj_hasattr(tx, name)

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        del tx, args, kwargs
        leave(self.told, self.module._orig_mod)

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("forward", "__call__"):
            leave(self.told, self.module._orig_mod)
        return self.tp_getattro_impl(tx, name).call_function(tx, args, kwargs)


class ScriptedFunction(VariableTracker):
    """Dynamo's variable for a function that ``torch.jit.script`` has made: Python calls it."""

    def python_type(self) -> type:
        return torch.jit.ScriptFunction

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        del tx, args, kwargs
        unimplemented(
            gb_type="scripted by the user",
            context=str(self.source),
            explanation="A function was made by torch.jit.script, and runs as that has made it.",
            hints=[],
        )


def name_of(called: Any) -> str:
    """The name of a module's class, or of a function, for people."""
    return (
        type(called).__name__ if isinstance(called, torch.nn.Module) else str(getattr(called, "__qualname__", called))
    )


def leave(told: Told, called: Any) -> None:
    """Break the graph at a call of a compiled module or function, and give that to ``told``."""
    told(called)
    name = name_of(called)
    unimplemented(
        gb_type="compiled by the user",
        context=name,
        explanation=f"{name} was compiled with torch.compile, and runs as that has made it.",
        hints=[],
    )


def _is_disabled(module: Any) -> bool:
    return DISABLED in getattr(getattr(module, "forward", None), "__dict__", {})


def _compiled_methods(kind: type) -> list[types.FunctionType]:
    methods = (value for one in kind.__mro__ for value in vars(one).values())
    return [value for value in methods if isinstance(value, types.FunctionType) and is_compiled(value)]
