"""Dynamo's variables, which stand for what a step handles while it is traced: their classes, and new ones.

* Those for Python's built-ins and NumPy's functions, and the handlers of comparisons: what is made of constants is a
  constant (see ``capture.tracing._numpy`` and ``capture.tracing._constants``).
* Those for loggers and for functions that Dynamo ignores: what a step says is said (see ``capture.tracing._messages``).
* ``TensorVariable``, by which it calls a tensor's methods, and ``TorchInGraphFunctionVariable``: for the values of a
  mask (see ``capture.tracing._masks``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.source import AttrSource, GlobalSource, TensorPropertySource
from torch._dynamo.symbolic_convert import compare_op_handlers as compare_handlers
from torch._dynamo.variables import builtin, misc
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable, TupleVariable
from torch._dynamo.variables.misc import (
    GetAttrVariable,
    LoggingLoggerVariable,
    NumpyVariable,
    StringFormatVariable,
)
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from lightning_remat.capture._torch._symbols import symbolic_node

__all__ = [
    "BaseListVariable",
    "BuiltinVariable",
    "GetAttrVariable",
    "IgnoredFunctionVariable",
    "LazyVariableTracker",
    "LoggingLoggerVariable",
    "NumpyVariable",
    "SetAttrVariable",
    "SkipFunctionVariable",
    "StringFormatVariable",
    "SymNodeVariable",
    "TensorVariable",
    "TorchInGraphFunctionVariable",
    "TupleVariable",
    "UnspecializedNNModuleVariable",
    "UserFunctionVariable",
    "VariableBuilder",
    "VariableTracker",
    "attribute_of",
    "build_attribute",
    "compare_handlers",
    "is_size",
    "reconstruct_as",
    "reconstruct_copy",
]

IgnoredFunctionVariable: Any = getattr(misc, "IgnoredFunctionVariable", LoggingLoggerVariable)
"""Dynamo's variable for functions that it is to ignore; where a release has none, that for loggers."""

SetAttrVariable: Any = getattr(builtin, "SetAttrBuiltinVariable", BuiltinVariable)
"""Dynamo's variable that sets attributes: torch 2.13's; in earlier releases it is the one for all built-ins."""


def build_attribute(translator: Any, owner: Any, name: str) -> Any:
    """While Dynamo traces: a variable for an attribute of an object, which is read anew in every call."""
    return VariableTracker.build(translator, getattr(owner, name), attribute_of(translator, owner, name))


def attribute_of(translator: Any, owner: Any, name: str) -> AttrSource:
    """While Dynamo traces: the source of an attribute of an object."""
    return AttrSource(GlobalSource(translator.output.install_global_by_id("lightning_remat", owner)), name)


def is_size(variable: Any) -> bool:
    """While Dynamo traces: whether a variable is a symbolic size of what the step is given, or computed from such alone."""
    number = getattr(variable, "sym_num", None)
    if not isinstance(number, torch.SymInt):
        return False
    node = symbolic_node(number)
    sources = node.shape_env.var_to_sources
    return all(
        any(isinstance(source, TensorPropertySource) for source in sources.get(symbol, ()))
        for symbol in node.expr.free_symbols
    )


def reconstruct_copy(codegen: Any, value: Any) -> None:
    """In the code that Dynamo writes around a graph: a copy of a value that it has found while tracing."""
    name = codegen.tx.output.install_global_by_id("constant", value)
    codegen.add_push_null(lambda: codegen.load_import_from("copy", "copy"))
    codegen.append_output(codegen.create_load_global(name, add=True))
    codegen.extend_output(create_call_function(1, False))


def reconstruct_as(codegen: Any, kind: type, variable: VariableTracker) -> None:
    """In the code that Dynamo writes around a graph: call this type, found in its module, on a variable's value."""
    codegen.add_push_null(lambda: codegen.load_import_from(kind.__module__, kind.__name__))
    codegen(variable)
    codegen.extend_output(create_call_function(1, False))
