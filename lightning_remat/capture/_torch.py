"""Every private torch import of the project. Tried on torch 2.15.0, 2.14.1 and 2.13.0 (Python 3.11) and 2.11.0 (Python 3.12).

``_versions`` lists all the names, and looks them up before this is imported.

What is used and why:

* ``aot_autograd`` with ``partition_fn``: AOTAutograd hands over the joint forward-backward graph, and runs what it gets back.
* ``FakeTensor`` helpers: planning runs real operations in the middle of fake tracing, and a network larger than the memory
  is captured as a fake one.
* ``py_kernels`` of ops: AOTAutograd decomposes some ops (``upsample_bilinear2d``, ``dropout``, ``lstm``) although no
  decompositions are asked for; the decomposed op has other bits and another speed than eager. They are kept whole, cuDNN's
  batch norm as ``_batch_norm_with_update`` (see `calls_cudnn`).
* ``FakeTensorMode._dispatch_impl``: some fake results have other strides than the real ones (see ``_layouts``).
* ``FunctionalTensorMode.__torch_dispatch__``: where an op in place is about to become one that is not (see `spaced_results`).
* ``_AutoDispatchBelowAutograd``: oneDNN's LSTM asks whether gradients are enabled (see `_lstm_layer`).
* ``_inductor.config.fallback_random``: without it, AOTAutograd drops random ops whose result nobody reads; eager draws them.
  ``fx.Node.is_impure``: what else it drops (see ``_effects``).
* ``_assert_async``, ``with_effects``, ``auto_functionalized`` and ``print``: the forms that effects have in a traced graph, and
  ``partitioner_tag``, AOTAutograd's note on each node, by which those of the backward are known.
* ``TorchInGraphFunctionVariable._get_handlers``: Dynamo's own decomposition of ``addcdiv`` (see `whole_ops` for AOTAutograd's),
  and its answers to code that asks whether it is compiled, or for the values of a mask (see `_masks`; ``TensorVariable``
  is where it calls a tensor's methods).
* ``_dynamo.exc.unimplemented``, ``_dynamo.config.allow_rnn``: recurrent layers are traced where that gives eager's bits, and
  left alone where it does not (`_recurrent`).
* Dynamo's sources and guards: what such an answer rests on is asked again in every step.
* ``OptimizedModule``, what ``torch.compile`` writes on functions and modules, and what Dynamo makes of these: what the user has
  compiled is left alone (see ``_compiled``).
* ``distributed_c10d._get_default_store``: where processes that train together leave notes for each other.
* ``TorchDispatchMode`` and an op's kernel for one device: a kernel's result on memory that is given to it; and what eager mode
  runs, op by op, with the number of each in autograd's graph: by it an op of a backward is known to be that of a forward.
* ``torch.utils._sympy``: the arithmetic of symbolic sizes, as numbers and as nodes of a graph.
* ``fx.experimental._config``: sizes that happen to be equal are told apart.
* AOTAutograd's descriptors of inputs and outputs: which argument a primal or a gradient belongs to (it makes one primal of
  arguments that share memory, several of a tensor subclass, and puts others first), which output a tangent, and what is
  written back.
* ``TracingContext``: AOTAutograd's notes on what a forward saves, which hold for its first version only, and on how gradients
  lie that a backward is handed (see `Exchange`).
* ``run_functionalized_fw_and_collect_metadata``: where AOTAutograd decides how these lie (see `_tangents_lie`), and
  ``MemoryFormatMeta``, its note on each.
* ``_profiler_enabled``, and what counts the steps of profilers: only one can run (see ``_profiler``).
* ``_enter_inference_mode``: torch before 2.13 cannot capture it (see ``_inference``).
* ``_enter_autocast``, ``_exit_autocast``: regions of autocast in a captured graph (see ``_autocast``).
* ``_accelerator_setAllocatorSettings``: expandable segments are switched on while a scheduled step runs.
* ``_dynamo.optimize``, ``compile_lock``: all that is set or replaced in torch is so only while Dynamo has a frame of ours to
  capture, and its lock is held: neither a step that runs nor what another thread captures sees any of it.
* ``ConvertFrameReturn``: a frame that is captured over and over is left alone, and only by this library (see `compile_frame`).
* ``_dynamo.config``: the recompile limit, logging calls and DDP's graph splitting.
* ``VariableBuilder.wrap_symfloat``: Dynamo makes an input of a Python float only where all sizes are symbols too, with no way
  to ask for one (see `VaryingFloats`). AOTAutograd would make tensors of such floats, which round otherwise: that is left out
  (``TENSORIFY_PYTHON_SCALARS``). ``TensorifyState`` tells Dynamo to begin again with a float as a constant. ``SymNode``
  simplifies what Python rounds at each operation, and ``_format_value`` forgets a float's format: both are corrected.
* Dynamo's variables for Python's built-ins and NumPy's functions, and its handlers of comparisons: what is made of constants is
  one (see `_numpy` and `_constants`).
* Dynamo's variables for loggers and for functions that it ignores: what a step says is said (see `_messages`). The names that
  its guards use, to find in the next call what one of its sources names (see `_early`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import logging
import math
import operator
import os
import re
import sys
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch._dynamo
import torch.distributed
import torch.fx
from torch._C import DispatchKey, DispatchKeySet
from torch._dynamo import types as dynamo_types
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, unimplemented
from torch._dynamo.guards import GuardBuilder, _get_closure_vars, install_guard
from torch._dynamo.source import AttrSource, ConstantSource, GlobalSource, TensorProperty, TensorPropertySource
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase, TensorifyState
from torch._dynamo.symbolic_convert import compare_op_handlers as compare_handlers
from torch._dynamo.utils import counters as dynamo_counters
from torch._dynamo.variables import misc
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import TrackedFake, VariableBuilder  # type: ignore[attr-defined]
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable
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
from torch._functorch import aot_autograd as functorch_aot
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta
from torch._guards import Source, TracingContext
from torch._inductor import config as inductor_config
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import profiler as autograd_profiler
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.fx.experimental import _config as symbolic_config
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeGuardPythonPrinter
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_remat.capture._layouts import real_layout, with_narrow_gaps
from lightning_remat.capture._regions import inline_regions
from lightning_remat.capture._tangents import Given, Layout, Layouts

__all__ = [
    "COMPILED_CALL",
    "DISABLED",
    "FUNCTIONALIZED",
    "INLINED",
    "ORIGINAL",
    "PRINT",
    "WITH_EFFECTS",
    "Arrival",
    "AttrSource",
    "BaseListVariable",
    "BuiltinVariable",
    "FakeTensor",
    "Frame",
    "GetAttrVariable",
    "HigherOrderOperator",
    "IgnoredFunctionVariable",
    "LoggingLoggerVariable",
    "Modules",
    "NumpyVariable",
    "OpOverload",
    "OptimizedModule",
    "SkipFunctionVariable",
    "Source",
    "StringFormatVariable",
    "SymNodeVariable",
    "TensorVariable",
    "TorchInGraphFunctionVariable",
    "TupleVariable",
    "UnspecializedNNModuleVariable",
    "UserFunctionVariable",
    "VariableBuilder",
    "VariableTracker",
    "VaryingFloats",
    "absent",
    "accumulates_into",
    "allocator_settings",
    "assert_async",
    "autocast_region",
    "backward_number",
    "boxed",
    "build_attribute",
    "calls_cudnn",
    "capture_failures",
    "captured_node",
    "collected",
    "compare_handlers",
    "compile_frame",
    "computed",
    "copied",
    "default_store",
    "dynamo_counters",
    "ends_function",
    "enter_autocast",
    "enter_inference_mode",
    "exit_autocast",
    "expression",
    "fake_tensors",
    "floats_as_constants",
    "found_at",
    "free_symbols",
    "given",
    "given_now",
    "guard_on",
    "guard_on_gradients",
    "hint",
    "in_backward",
    "is_code_of",
    "is_size",
    "is_to_run",
    "is_whole_function",
    "keep_saved",
    "largest",
    "lead_only_to",
    "logging_calls",
    "needs_kept",
    "observed_ops",
    "on_backward",
    "output_of_tangent",
    "profilers_counting",
    "profiling",
    "profiling_anywhere",
    "real_layouts",
    "real_tensors",
    "recapture_reason",
    "reconstruct_as",
    "reconstruct_copy",
    "run_below_autograd",
    "run_on_cpu",
    "runs_in_forward",
    "set_allocator_settings",
    "sizes_from_floats",
    "source_name",
    "sources_of_gradients",
    "spaced_results",
    "substitute",
    "tensor_leaves",
    "tracing",
    "uncollected",
    "unimplemented",
    "varying",
    "whole_ops",
    "with_fakes",
]

assert_async = torch._assert_async

enter_inference_mode = torch.autograd.grad_mode._enter_inference_mode
enter_autocast, exit_autocast = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
"""What a region of autocast is in a graph of Dynamo's: its begin, with its settings, and its end."""

IgnoredFunctionVariable: Any = getattr(misc, "IgnoredFunctionVariable", LoggingLoggerVariable)
"""Dynamo's variable for functions that it is to ignore; where a release has none, that for loggers."""

WITH_EFFECTS, PRINT, *_others = (
    getattr(torch.ops.higher_order, name, None)
    for name in ("with_effects", "print", "auto_functionalized", "auto_functionalized_v2")
)
"""An op that is called between tokens, and one that prints (since torch 2.12)."""

FUNCTIONALIZED = tuple(op for op in _others if op is not None)
"""An operator that overwrites its arguments, called on copies, which are returned."""

INLINED, ORIGINAL = "_torchdynamo_inline", "_torchdynamo_orig_callable"
"""Attributes of a function that ``torch.compile`` has made: what Dynamo traces in its place, and what was compiled."""

DISABLED = "_torchdynamo_disable"
"""Attribute of a function that Dynamo is to leave alone."""

COMPILED_CALL = "_compiled_call_impl"
"""Attribute of a module: what ``module.compile()`` has made."""

# Ops whose Python decompositions stay. The batch norms' kernels overwrite the running statistics without saying so, which
# a functional graph cannot hold; `dropout` becomes `native_dropout`, which the capture knows how to split.
_KEEP_DECOMPOSED = (
    "miopen_batch_norm",
    "native_batch_norm",
    "dropout",
    "empty",
    "broadcast_tensors",
)
# The same in Python as in torch's C++, which reads sizes as numbers.
_KEEP_FOR_SYMBOLS = ("matmul",)
_COMPOSITE_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


def _unasked_decompositions(symbolic: bool) -> list[OpOverload]:
    found = []
    kept = (*_KEEP_DECOMPOSED, *(_KEEP_FOR_SYMBOLS if symbolic else ()))
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not hasattr(packet, "overloads") or name in kept:
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if any(key in op.py_kernels for key in _COMPOSITE_KEYS):
                found.append(op)
    return found


def _upsample(op: OpOverload, x: torch.Tensor, output_size: Any, *others: Any, **named: Any) -> torch.Tensor:
    """What torch's own kernel does for the overloads that take ``scale_factors``, which refuses symbolic sizes."""
    arguments = [*others, *named.values()]  # in the schema's order
    factors: list[float] | None = arguments.pop()
    scales: Sequence[float | None] = factors or [None] * (x.dim() - 2)
    if output_size is None and factors is not None:
        as_int: Any = torch.sym_int  # without types before torch 2.14
        output_size = [as_int(size * factor) for size, factor in zip(x.shape[2:], factors, strict=True)]
    made: torch.Tensor = op(x, output_size, *arguments, *scales)
    return made


def _upsamplings() -> list[tuple[OpOverload, OpOverload]]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if "upsample_" in name]
    return [(p.vec, p.default) for p in packets if {"vec", "default"} <= set(getattr(p, "overloads", list)())]


def _cudnn_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Batch norm of cuDNN, traced: where it overwrites the running statistics, torch's op that says so.

    That one has a functional form, and runs cuDNN's kernel where eager does. torch itself traces the native batch norm
    instead, which has other bits.
    """
    if training and running_mean is not None:
        op = torch.ops.aten._batch_norm_with_update.default
        return op(x, weight, bias, running_mean, running_var, momentum, eps)
    # Past this function, to what torch has for the key: it makes the op differentiable and calls it below.
    op_at = torch.ops.aten.cudnn_batch_norm.default._op_dk
    return op_at(DispatchKey.Autograd, x, weight, bias, running_mean, running_var, training, momentum, eps)


def _lstm_layer(op: OpOverload, *args: Any) -> Any:
    """A layer of an LSTM of oneDNN, traced: whether gradients are enabled stands in ``train``.

    By that the kernel chooses among two of other bits, and ``train`` it does not read.
    """
    return op._op_dk(DispatchKey.Autograd, *args[:-1], torch.is_grad_enabled())


@contextlib.contextmanager
def whole_ops(symbolic: bool = False) -> Iterator[None]:
    """Trace the ops that eager runs: take AOTAutograd's unasked Python decompositions away, and put them back."""
    import torch._decomp  # registers them
    import torch._refs

    removed: list[tuple[OpOverload, DispatchKey, Any]] = []
    ops = _unasked_decompositions(symbolic)
    try:
        for op in ops:
            for key in _COMPOSITE_KEYS:
                if key in op.py_kernels:
                    removed.append((op, key, op.py_kernels.pop(key)))
            op._dispatch_cache.clear()
        for vec, op in _upsamplings():
            vec.py_kernels[DispatchKey.CompositeImplicitAutograd] = functools.partial(_upsample, op)
            vec._dispatch_cache.clear()
        torch.ops.aten.cudnn_batch_norm.default.py_kernels[DispatchKey.Autograd] = _cudnn_batch_norm
        layer = torch.ops.aten.mkldnn_rnn_layer.default
        layer.py_kernels[DispatchKey.Autograd] = functools.partial(_lstm_layer, layer)
        layer._dispatch_cache.clear()
        yield
    finally:
        torch.ops.aten.mkldnn_rnn_layer.default.py_kernels.pop(DispatchKey.Autograd, None)
        torch.ops.aten.mkldnn_rnn_layer.default._dispatch_cache.clear()
        for vec, _ in _upsamplings():
            vec.py_kernels.pop(DispatchKey.CompositeImplicitAutograd, None)
            vec._dispatch_cache.clear()
        for op, key, kernel in removed:
            op.py_kernels[key] = kernel
        for op in ops:
            op._dispatch_cache.clear()


def _fake_batch_norm(dispatch: Callable[..., Any], mode: Any, types: Any, args: Any) -> tuple[Any, ...]:
    """The native batch norm's fake results, and between them cuDNN's reserve space, which torch would ask the device for.

    Its size is not known without: it is taken to be 0 bytes, as torch does for ``cudnn_batch_norm``.
    """
    *given, momentum, eps = args
    native = torch.ops.aten._native_batch_norm_legit_functional.default
    output, mean, invstd, *statistics = dispatch(mode, native, types, (*given, True, momentum, eps), {})
    with mode:
        reserve = torch.empty(0, dtype=torch.uint8, device=output.device)
    return output, mean, invstd, reserve, *statistics


@contextlib.contextmanager
def real_layouts() -> Iterator[None]:
    """Trace with the strides that the real kernels give (`real_layout`)."""
    original: Any = FakeTensorMode._dispatch_impl

    def dispatch(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._batch_norm_with_update_functional.default:
            return _fake_batch_norm(dispatch, self, types, args)
        result = original(self, func, types, args, kwargs)
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(first, FakeTensor):
            return result
        with self:
            layout = real_layout(func, args)
            if layout is None or layout.stride() == first.stride():
                return result
            true = torch.empty_strided(first.shape, layout.stride(), dtype=first.dtype, device=first.device)
        return (true, *result[1:]) if isinstance(result, (tuple, list)) else true

    FakeTensorMode.cache_clear()  # it may hold results with the other strides
    FakeTensorMode._dispatch_impl = dispatch  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensorMode._dispatch_impl = original  # type: ignore[method-assign]
        FakeTensorMode.cache_clear()


@contextlib.contextmanager
def _grouped_products() -> Iterator[None]:
    """Trace products of experts (``_grouped_mm``) in any type: torch's fake one is for bfloat16 alone, the real one is not."""
    original: Any = FakeTensorMode._dispatch_impl

    def dispatch(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return original(self, func, types, args, kwargs)
        left, right, *others = args
        offsets = others[0] if others else kwargs.get("offs")
        size = [*left.shape[:-1], right.shape[-1]] if left.dim() >= right.dim() else [left.shape[0], right.shape[-1]]
        if left.dim() == right.dim() == 2:
            size = [offsets.shape[0], *size]
        elif left.dim() > right.dim():
            size = size[1:]
        # Rows begin at multiples of 16 bytes.
        alignment = 16 // left.dtype.itemsize
        row = (size[-1] + alignment - 1) // alignment * alignment
        strides = [size[1] * row, row, 1][-len(size) :]
        with self:
            return torch.empty_strided(size, strides, dtype=left.dtype, device=left.device)

    FakeTensorMode._dispatch_impl = dispatch  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensorMode._dispatch_impl = original  # type: ignore[method-assign]


@contextlib.contextmanager
def spaced_results() -> Iterator[None]:
    """Trace what eager computes in place on a part of a wider tensor, which is not known as a view of it, with gaps.

    ``unsafe_chunk``, as ``nn.GRUCell`` uses it, gives such parts. The traced op is not in place, and its fake result would be
    dense; eager's kernels go from row to row, and compute the last elements of each, which do not fill a vector of the
    processor, in another way. With gaps between its rows, however small, the result is computed and read as eager's is.
    """
    functional: Any = FunctionalTensorMode.__torch_dispatch__
    dispatch: Any = FakeTensorMode.dispatch
    wanted: list[tuple[str, tuple[Any, Any, torch.dtype]]] = []

    def observe(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _writes_elements(func) or not isinstance(args[0], FunctionalTensor) or not args[0].is_base_tensor():
            return functional(self, func, types, args, kwargs)
        stride = with_narrow_gaps(args[0].shape, args[0].stride()) if args[0].device.type == "cpu" else None
        if stride is None:
            return functional(self, func, types, args, kwargs)
        wanted.append((func._schema.name, (args[0].shape, stride, args[0].dtype)))
        try:
            return functional(self, func, types, args, kwargs)
        finally:
            wanted.clear()

    def spaced(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not wanted or not isinstance(func, OpOverload) or f"{func._schema.name}_" != wanted[0][0]:
            return dispatch(self, func, types, args, kwargs)
        shape, stride, dtype = wanted.pop()[1]
        result = dispatch(self, func, types, args, kwargs)
        if result.shape != shape or result.dtype != dtype:
            return result
        with self:
            return torch.empty_strided(shape, stride, dtype=dtype, device=result.device)

    FunctionalTensorMode.__torch_dispatch__ = observe  # type: ignore[method-assign]
    FakeTensorMode.dispatch = spaced  # type: ignore[method-assign]
    try:
        yield
    finally:
        FunctionalTensorMode.__torch_dispatch__ = functional  # type: ignore[method-assign]
        FakeTensorMode.dispatch = dispatch  # type: ignore[method-assign]


def _writes_elements(func: Any) -> bool:
    """Whether an op computes its first argument's elements in place, from the elements of the others."""
    if not isinstance(func, OpOverload) or torch.Tag.pointwise not in func.tags:
        return False
    first = func._schema.arguments[0].alias_info
    return first is not None and first.is_write and func._schema.name.endswith("_")


def calls_cudnn(x: torch.Tensor) -> bool:
    """Whether ``_batch_norm_with_update`` of such a tensor was traced for cuDNN's batch norm: there is one on the device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::cudnn_batch_norm", x.device.type.upper())


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made inside have shapes, types and devices, and no memory: a network of any size can be captured."""
    with _silent_loggers(), FakeTensorMode(allow_non_fake_inputs=True):  # an op that raises says so itself
        yield


def with_fakes(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], like: torch.Tensor) -> Any:
    """What a call returns for tensors of which there is no memory, those of the fake tensor ``like``'s own mode."""
    mode = like.fake_mode if isinstance(like, FakeTensor) else FakeTensorMode()
    fakes = tree_map_only(
        torch.Tensor, lambda x: x if isinstance(x, FakeTensor) else mode.from_tensor(x), (args, kwargs)
    )
    with mode:
        return call(*fakes[0], **fakes[1])


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Leave fake tensor mode: tensors made inside are real."""
    return _disable_current_modes()


class _GivenMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While a kernel runs: whatever it allocates in the likeness of ``like`` is one and the same tensor.

    Attributes:
        memory: that tensor: the one given, or else the first that is allocated.
    """

    def __init__(self, like: torch.Tensor, memory: torch.Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.like, self.memory = like, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        alike = func is torch.ops.aten.empty_like.default and args[0] is self.like
        if alike and self.memory is not None:
            return self.memory
        result = func(*args, **(kwargs or {}))
        if alike:
            self.memory = result
        return result


_CPU = DispatchKeySet(DispatchKey.CPU)


def run_on_cpu(op: OpOverload, args: tuple[Any, ...], *, like: torch.Tensor, memory: torch.Tensor | None) -> Any:
    """Call an op's kernel for the CPU. All that it allocates in the likeness of ``like`` is ``memory``, where that is given,
    and one tensor in any case.
    """
    with _GivenMemory(like, memory):
        return op.redispatch(_CPU, *args)


def run_below_autograd(op: OpOverload, *args: Any, gradients: bool) -> Any:
    """Call an op whose kernel asks whether gradients are enabled; autograd does not see it in any case."""
    with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(gradients):
        return op(*args)


ObserveOp = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], int, Callable[[], Any]], Any]
"""Given an op, its arguments, the number of the node of autograd's graph that runs it or was made for it last, and what runs
it: runs it, and returns its result.
"""


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_autograd_node() is not None


class _ObservedOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, observe: ObserveOp) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observe = observe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        node: Any = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else torch._C._autograd._get_sequence_nr() - 1
        kwargs = kwargs or {}
        return self._observe(func, args, kwargs, number, functools.partial(func, *args, **kwargs))


def observed_ops(observe: ObserveOp) -> contextlib.AbstractContextManager[Any]:
    """Every op that eager mode runs meanwhile, forward or backward, is run through ``observe``."""
    return _ObservedOps(observe)


_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")


def boxed(module: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module as a function of one list, which it clears, so that nothing outside keeps its arguments alive."""
    codegen: Any = _BoxedCodeGen  # without types before torch 2.12
    module.graph.set_codegen(codegen())
    code = module.graph.python_code("self")
    names = dict(code.globals)

    def directly(match: re.Match[str]) -> str:
        namespace, packet, overload = match.groups()
        name = f"call_{namespace}_{packet}_{overload}"
        names[name] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._op
        return name

    # An operator's own call, looked up once: a third or more of what a call costs before its kernel.
    exec(_OPERATOR.sub(directly, code.src), names)
    forward = names["forward"]

    def run(args: list[Any]) -> Any:
        return forward(module, args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


_COLLECTED_OUTSIDE: list[bool] = []


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's garbage collector: tracing makes so many objects that looking for cycles is a quarter of its time."""
    _COLLECTED_OUTSIDE.append(gc.isenabled())
    gc.disable()
    try:
        yield
    finally:
        if _COLLECTED_OUTSIDE.pop():
            gc.enable()


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Inside of `uncollected`: with the garbage collector again, where it was on outside."""
    enabled = bool(_COLLECTED_OUTSIDE) and _COLLECTED_OUTSIDE[0] and not gc.isenabled()
    if enabled:
        gc.enable()
    try:
        yield
    finally:
        if enabled:
            gc.disable()


@dataclasses.dataclass(frozen=True)
class Modules:
    """A captured graph as AOTAutograd runs it.

    Attributes:
        forward: returns ``returned`` outputs, then the saved tensors, then ``sizes`` saved sizes.
        backward: takes the saved sizes, the saved tensors and the tangents.
        returned, sizes: their numbers.
        summands: how many of the backward's last outputs are no gradients of their own (see ``_sums``).
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    returned: int
    sizes: int
    summands: int = 0


ObserveNode = Callable[[torch.fx.Node, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]
"""Given a node of a lowered module, its arguments and what runs it: runs it, and returns its result."""


class _Runner:
    """One module of a version.

    Attributes:
        without: of a backward, the same without some tangents (see `Exchange.unread`).
        laid_out: likewise, for tangents that lie otherwise (see `Exchange.arrive`).
        opened: likewise, with its sums taken apart (see `Exchange.opens`).
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.without: dict[frozenset[str], _Runner] = {}
        self.laid_out: dict[Arrival, _Runner] = {}
        self.opened: _Runner | None = None
        self.module, self._run = module, boxed(module)

    def __call__(self, args: list[Any], observe: ObserveNode | None) -> Any:
        if observe is None:
            return self._run(args)
        given = tuple(args)
        args.clear()
        return _Observed(self.module, observe).run(*given)


class _Observed(torch.fx.Interpreter):
    """Runs a module node by node."""

    def __init__(self, module: torch.fx.GraphModule, observe: ObserveNode) -> None:
        super().__init__(module)
        self._observe = observe

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        run = functools.partial(self.call_function, n.target, args, kwargs)
        return self._observe(n, args, kwargs, run)


class _Outputs(tuple[Any, ...]):
    """What a version's forward returns, said to be as long as ``told``: all of it is there for who iterates or takes slices.

    Attributes:
        told: how many AOTAutograd was told, when it compiled the first version.
    """

    told: int

    def __len__(self) -> int:
        return self.told


MOST_VERSIONS = 64
"""Versions of one captured graph that are kept ready to run (a megabyte or more for every few hundred operations)."""

_Version = tuple[_Runner, _Runner, torch.Tensor]

Arrival = frozenset[tuple[int, Layout]]
"""How tangents lie that do not lie as a version's backward was made for: by the position of the output, its layout."""


def _names(modules: Modules) -> tuple[str, ...]:
    """Of what a forward hands over to its backward, in order."""
    outputs: Any = modules.forward.graph.output_node().args[0]
    return tuple(str(one) for one in outputs[modules.returned :])


class Exchange:
    """What AOTAutograd runs for one captured graph: one of several versions of it, each a forward and its backward.

    AOTAutograd asks how many outputs and sizes a forward has, but not how many tensors it saves, so that versions may save
    different ones. (It would note which of the first version's have symbolic sizes: it is not told what they are. Since torch
    2.14 it notes which of them are inputs, not to make aliases of these: it is told that none are, as before. And where there
    are tensor subclasses, torch 2.14 counts a forward's own outputs by what is left beside the first version's: see
    `_Outputs`.) Each forward saves its version's number too, and the backward is that of the forward that saved for it,
    however many calls wait for theirs. One thread at a time may call it.

    Of versions that can be made again, those that ran last are kept (`MOST_VERSIONS`); one that is gone is made again when it
    is to run, or when the backward of one of its forwards begins.

    Attributes:
        current: the version that the next forward runs.
        dropped: positions of gradients that the next backward does not hand over.
        unread: the tangents (targets of placeholders) that the next backward is not given, but zeros for.
        without: makes a backward with such tangents left out.
        summands: see `Modules`.
        opens: whether the sums of the next backward are taken apart.
        opened: makes a backward that does so.
        summed: what that hands out: by the position of a gradient, those of its other summands.
        taken: is given these by the next backward.
        ported: tangents of the next backward that autograd has handed over zeros for, by their positions among its arguments,
            counted from the end (see ``_ports``).
        done: called when the next backward has run.
        observe: where it is set, every op is run through it (slow).
    """

    def __init__(self) -> None:
        self.current = 0
        self.dropped: frozenset[int] = frozenset()
        self.unread: frozenset[str] = frozenset()
        self.without: Callable[[torch.fx.GraphModule, frozenset[str]], torch.fx.GraphModule] = lambda module, _: module
        self.summands = 0
        self.opens = False
        self.opened: Callable[[torch.fx.GraphModule], torch.fx.GraphModule] = lambda module: module
        self.summed: Mapping[int, Sequence[int]] = {}
        self.taken: Callable[[Sequence[Any]], None] | None = None
        self.ported: Mapping[int, torch.Tensor] = {}
        self.done: Callable[[], None] | None = None
        self.observe: ObserveNode | None = None
        self._versions: dict[int, _Version] = {}  # the one that ran last at the end
        self._made_again: dict[int, tuple[Callable[[], Modules], tuple[str, ...]]] = {}
        self._added = 0
        self._returned = self._sizes = self._told = -1
        self._most_saved = 0
        self._inputs_saved: list[bool] = []
        self._tangents: list[Any] = []  # AOTAutograd's notes on them, and what they say at first of how they lie
        self._expected: list[Any] = []
        self._arrival: Arrival = frozenset()

    def add(self, modules: Modules, again: Callable[[], Modules] | None = None) -> int:
        """One more version; returns its number. ``again`` makes its modules once more: the same ones."""
        if self._added and (modules.returned, modules.sizes) != (self._returned, self._sizes):
            raise ValueError(
                f"{modules.returned} outputs and {modules.sizes} sizes are no version of {self._returned} and {self._sizes}"
            )
        self._returned, self._sizes = modules.returned, modules.sizes
        number, self._added = self._added, self._added + 1
        outputs: Any = modules.forward.graph.output_node().args[0]
        if again is not None:
            self._made_again[number] = again, _names(modules)
        self._put(number, modules)
        self._most_saved = max(self._most_saved, len(outputs) - modules.returned - modules.sizes + 1)
        self._note_inputs()
        return number

    def _put(self, number: int, modules: Modules) -> _Version:
        outputs: Any = modules.forward.graph.output_node().args[0]
        if number == 0:
            self._told = len(outputs)
        for saved in outputs[modules.returned : len(outputs) - modules.sizes]:
            saved.meta.pop("val", None)
        with real_tensors():
            mark = torch.tensor(number, device="cpu")
        version = self._versions[number] = _Runner(modules.forward), _Runner(modules.backward), mark
        ready = [one for one in self._versions if one in self._made_again]
        for one in ready[: max(0, len(ready) - MOST_VERSIONS)]:
            del self._versions[one]
        return version

    def _version(self, number: int) -> _Version:
        """One that is kept, or made again."""
        if number in self._versions:
            found = self._versions[number] = self._versions.pop(number)
            return found
        again, names = self._made_again[number]
        modules = again()
        if _names(modules) != names:  # a backward may wait for what a forward of the first has saved
            raise RuntimeError(
                "a schedule was lowered again, and came out otherwise: this is a defect of lightning_remat"
            )
        return self._put(number, modules)

    def noted_by(self, metadata: Any) -> None:
        """What AOTAutograd will ask at run time of the first version is to hold for all versions."""
        self._inputs_saved = getattr(metadata, "saved_tensor_is_graph_input", [])
        self._note_inputs()
        if all(isinstance(note, PlainTensorMeta) for note in metadata.subclass_tangent_meta):
            self._tangents = list(metadata.subclass_tangent_meta)
            self._expected = [note.memory_format for note in self._tangents]

    def _note_inputs(self) -> None:
        self._inputs_saved[:] = [False] * self._most_saved

    def expect(self, tangents: Sequence[Given | None]) -> bool:
        """How the tangents of the next backward lie: AOTAutograd hands them on as they are; returns whether it will.

        Where there is ``None``, it lays them out as it has traced them.
        """
        if len(tangents) != len(self._tangents):
            return False
        for note, expected, given in zip(self._tangents, self._expected, tangents, strict=True):
            if given is None:
                note.memory_format = expected
            else:
                note.memory_format = MemoryFormatMeta(size=torch.Size(given[0]), stride=given[1])
        return True

    def knows(self, number: int, arrival: Arrival) -> bool:
        """Whether a version has a backward for tangents that lie so."""
        return arrival in self._version(number)[1].laid_out

    def arrive(self, number: int, arrival: Arrival, backward: torch.fx.GraphModule | None = None) -> None:
        """The tangents of the next backward, a version's, lie so; ``backward`` is made for that, where none is known yet."""
        self._arrival = arrival
        if backward is not None:
            self._version(number)[1].laid_out[arrival] = _Runner(backward)

    def forward(self, args: list[Any]) -> tuple[Any, ...]:
        """The current version's forward."""
        run, _, number = self._version(self.current)
        outputs = run(args, self.observe)
        given = _Outputs((*outputs[: self._returned], number, *outputs[self._returned :]))
        given.told = self._told
        return given

    def backward(self, args: list[Any]) -> Any:
        """The backward of the forward that saved ``args``."""
        number = int(args.pop(self._sizes))
        dropped, self.dropped = self.dropped, frozenset()
        ported, self.ported = self.ported, {}
        for i, tangent in ported.items():
            args[i] = tangent
        del ported
        summands = self.summands
        if self.opens:
            summands = sum(map(len, self.summed.values()))
            dropped = dropped.union(*(self.summed.get(i, ()) for i in dropped))
        found = self._backward(number)(args, self.observe)
        if dropped:
            found = tuple(None if i in dropped else one for i, one in enumerate(found))
        taken, self.taken = self.taken, None
        if summands and taken is not None:
            taken(found[len(found) - summands :])
        done, self.done = self.done, None
        if done is not None:
            done()
        return found[: len(found) - summands]

    def _backward(self, number: int) -> _Runner:
        """The next backward of a version."""
        unread, self.unread = self.unread, frozenset()
        arrival, self._arrival = self._arrival, frozenset()
        run = self._version(number)[1]
        if arrival:
            run = run.laid_out[arrival]
        if unread and unread not in run.without:
            module = self.without(run.module, unread)
            run.without[unread] = run if module is run.module else _Runner(module)
        run = run.without[unread] if unread else run
        opens, self.opens = self.opens, False
        if opens and run.opened is None:
            run.opened = _Runner(self.opened(run.module))
        return run.opened if opens and run.opened is not None else run


Partition = Callable[..., Modules]


class Frame:
    """What Dynamo has captured, to be traced by AOTAutograd, and once more where gradients turn out to lie otherwise.

    Args:
        module: the captured forward.
        parts: ops that are captured as the ops that they are made of.
        symbolic: whether sizes are symbols.
        stays: ops for which this is true are there although nobody reads their results.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        parts: Mapping[OpOverload, Callable[..., Any]],
        symbolic: bool,
        stays: Callable[[Any], bool],
    ) -> None:
        inline_regions(module)
        self.module = module
        self._parts, self._symbolic, self._stays = parts, symbolic, stays
        placeholders = module.graph.find_nodes(op="placeholder")
        self._examples = [node.meta.get("example_value") for node in placeholders]  # Dynamo clears the nodes
        kinds = ("cpu", "cuda")
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._autocast_cache = torch.is_autocast_cache_enabled()

    def compiled(self, example_inputs: Sequence[Any], partition: Partition) -> tuple[Callable[..., Any], Exchange]:
        """Run AOTAutograd; ``partition`` turns the joint graph into forward and backward.

        What runs can be exchanged for other versions of it.
        """
        exchange = Exchange()
        waiting = [partition]  # which holds the step's inputs, and torch 2.11 keeps what it is called by

        def partitioned(*args: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
            modules = waiting[0](*args, **kwargs)
            exchange.add(modules)
            exchange.summands = modules.summands
            return modules.forward, _with_gradients_alone(modules.backward, exchange.summands)

        def inference(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            return boxed(module)

        def compiler(run: Callable[[list[Any]], Any]) -> Callable[..., Callable[[list[Any]], Any]]:
            def compiled(_module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
                if run == exchange.forward:
                    exchange.noted_by(TracingContext.get().fw_metadata)

                def call(args: list[Any]) -> Any:
                    return run(args)

                call._boxed_call = True  # type: ignore[attr-defined]
                return call

            return compiled

        backend = aot_autograd(
            fw_compiler=compiler(exchange.forward),
            bw_compiler=compiler(exchange.backward),
            inference_compiler=inference,
            partition_fn=partitioned,
            decompositions=dict(self._parts),
        )
        with self._settings():
            compiled: Callable[..., Any] = backend(self.module, example_inputs)
        waiting.clear()
        TensorifyState.clear()  # what Dynamo began again for is captured
        return compiled, exchange

    def joint(self, layouts: Layouts, read: Callable[..., Any]) -> Any:
        """What ``read`` makes of the joint graph, as a partition is given it, where gradients lie so; nothing is compiled.

        It is for the time of a backward: gradients are enabled, and autocast is as when the frame was captured.
        """
        found: list[Any] = []

        def partitioned(*args: Any, **kwargs: Any) -> Any:
            found.append(read(*args, **kwargs))
            raise _Traced

        def never(_module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
            raise RuntimeError("no gradient of it is needed")

        backend = aot_autograd(
            fw_compiler=never, bw_compiler=never, partition_fn=partitioned, decompositions=dict(self._parts)
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(compile_lock)
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    around = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._autocast_cache)
                    stack.enter_context(around)
            stack.enter_context(tracing())
            stack.enter_context(_tangents_lie(layouts))
            stack.enter_context(self._settings())
            with contextlib.suppress(_Traced):
                backend(self.module, self._examples)
        return found[0]

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        """What AOTAutograd is told while it traces."""
        settings: dict[str, Any] = {"donated_buffer": False}
        if hasattr(functorch_config, "backward_pass_autocast"):
            # "same_as_forward" gives other bits than eager where the step has a region with autocast off.
            settings["backward_pass_autocast"] = "off"
        with (
            whole_ops(self._symbolic),
            _floats_stay(),
            real_layouts(),
            spaced_results(),
            _unread_ops_stay(self._stays),
            functorch_config.patch(settings),
            inductor_config.patch(fallback_random=True),
        ):
            yield


class _Traced(BaseException):
    """The joint graph is there: nothing more is wanted of AOTAutograd."""


@contextlib.contextmanager
def _tangents_lie(layouts: Layouts) -> Iterator[None]:
    """AOTAutograd traces the backward for gradients that lie so."""
    own = functorch_aot.run_functionalized_fw_and_collect_metadata  # type: ignore[attr-defined]

    def collecting(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        collect = own(*args, **kwargs)

        def collected(*inputs: Any) -> Any:
            metadata = collect(*inputs)
            for i, description in enumerate(metadata.traced_tangents_descs):
                layout, tangent = layouts.get(_output_of(description)), metadata.traced_tangents[i]  # type: ignore[arg-type]
                if layout is not None and isinstance(tangent, FakeTensor):
                    with tangent.fake_mode:
                        metadata.traced_tangents[i] = layout.empty_like(tangent)
            return metadata

        return collected

    functorch_aot.run_functionalized_fw_and_collect_metadata = collecting  # type: ignore[attr-defined]
    try:
        yield
    finally:
        functorch_aot.run_functionalized_fw_and_collect_metadata = own  # type: ignore[attr-defined]


def _with_gradients_alone(backward: torch.fx.GraphModule, summands: int) -> torch.fx.GraphModule:
    """What AOTAutograd is shown, which counts the outputs (what runs is `Exchange.backward`)."""
    if not summands:
        return backward
    graph = torch.fx.Graph()
    outputs: Any = graph.graph_copy(backward.graph, {})
    graph.output(tuple(outputs[: len(outputs) - summands]))
    return torch.fx.GraphModule(backward, graph)


@contextlib.contextmanager
def _unread_ops_stay(stays: Callable[[Any], bool]) -> Iterator[None]:
    """Ops for which this is true are not taken for dead code."""
    own = torch.fx.Node.is_impure

    def is_impure(node: torch.fx.Node, impure_random: bool = True) -> bool:
        return own(node, impure_random) or (node.op == "call_function" and stays(node.target))

    torch.fx.Node.is_impure = is_impure  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.fx.Node.is_impure = own  # type: ignore[method-assign]


Around = Callable[[types.CodeType], contextlib.AbstractContextManager[Any]]


def compile_frame(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    around: Around,
    left: Container[types.CodeType] = (),
    symbolic: bool = False,
) -> Callable[..., Any]:
    """``function`` captured by Dynamo: one graph a shape, or with symbols for the sizes that vary (see `varying`).

    What ``around`` gives (asked with the frame's code) is open while a frame is captured, planned and lowered, and at no other
    time (see `tracing`). Frames whose code is in ``left`` when they are met are not captured (any more), nor what they call.
    """
    context: Any = torch._dynamo.optimize(backend=backend, dynamic=None if symbolic else False)
    context.callback = _Capture(context.callback, around, left)
    compiled: Callable[..., Any] = context(function)
    return compiled


class _Capture:
    """What Dynamo calls when it meets a frame for which it has no code."""

    def __init__(self, capture: Any, around: Around, left: Container[types.CodeType]) -> None:
        self._torchdynamo_orig_backend = (
            capture  # as Dynamo's own such wrappers name it: by it captured code is told apart
        )
        self._around = around
        self._left = left

    def __call__(self, frame: Any, *args: Any) -> Any:
        if frame.f_code in self._left:
            own: Any = dynamo_types
            skip = own.FrameExecStrategy(own.FrameAction.SKIP, own.FrameAction.SKIP)
            return own.ConvertFrameReturn(frame_exec_strategy=skip, apply_to_code=False)
        with compile_lock, self._around(frame.f_code):
            return self._torchdynamo_orig_backend(frame, *args)


@contextlib.contextmanager
def varying(dims: Iterable[tuple[torch.Tensor, Iterable[int]]]) -> Iterator[None]:
    """Ask Dynamo for symbols for these sizes of inputs."""
    before = []
    for tensor, its_dims in dims:
        before.append((tensor, dict(vars(tensor))))
        for dim in its_dims:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    try:
        yield
    finally:  # Dynamo also looks at whether there are marks at all
        for tensor, attributes in before:
            vars(tensor).clear()
            vars(tensor).update(attributes)


def default_store() -> Any:
    """The key-value store of the processes that train together.

    Raises:
        ValueError: where ``torch.distributed`` is not initialized.
    """
    return torch.distributed.distributed_c10d._get_default_store()


class VaryingFloats:
    """The Python floats that a function reads and that change from call to call: one graph holds for all of their values.

    A float is one of them where it was seen to change, and from the first where what Dynamo left alone has just returned it
    (``np.random.beta``).
    """

    def __init__(self) -> None:
        self._first: dict[tuple[types.CodeType, str], float] = {}

    @contextlib.contextmanager
    def symbolic(self) -> Iterator[None]:
        """Meanwhile Dynamo makes inputs of them."""
        own = VariableBuilder.wrap_symfloat

        def wrap(builder: VariableBuilder, value: float) -> VariableTracker:
            name = builder.name
            static = not _RETURNED.fullmatch(name) and self._first.setdefault((builder.tx.f_code, name), value) == value
            with torch._dynamo.config.patch(assume_static_by_default=static):
                return own(builder, value)

        VariableBuilder.wrap_symfloat = wrap  # type: ignore[assignment, method-assign]
        try:
            with _rounding_as_python_does(), _formatting_as_python_does():
                yield
        finally:
            VariableBuilder.wrap_symfloat = own  # type: ignore[method-assign]


_RETURNED = re.compile(r"L\['___stack\d+'\](\[[^\]]*\])*")
"""What a call has returned that the graph breaks at, and items of it."""

_ROUNDED = {"add": "+", "sub": "-", "mul": "*"}


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
    """A result of Python's float arithmetic, as a symbol of its own: guards compute it as the step does."""
    found = own(left, right)
    expression = found.expr
    environment = found.shape_env
    known_before = found.pytype is float and found.hint is not None and math.isfinite(found.hint)
    if not known_before or expression.is_Symbol or expression.is_number or environment.tracked_fakes is None:
        return found
    known = vars(environment).setdefault("_lightning_remat_rounded", {})
    if (sign, left.expr, right.expr) not in known:
        source = ConstantSource(f"({_words(left)} {sign} {_words(right)})")
        symbol = environment.create_unspecified_symbol(found.hint, source, DimDynamic.DYNAMIC)
        number = environment.create_symfloatnode(symbol, hint=found.hint, source=source)
        environment.tracked_fakes.append(TrackedFake(number, source, None))
        known[sign, left.expr, right.expr] = symbol, source
    symbol, source = known[sign, left.expr, right.expr]
    return environment.create_symfloatnode(symbol, hint=found.hint, source=source).node


def _words(number: Any) -> str:
    """A symbolic number in Python, as guards write it."""
    sources = number.shape_env.var_to_sources
    return str(ShapeGuardPythonPrinter(sources, _name_of, sources).doprint(number.expr))


def _name_of(source: Source) -> str:
    name: Any = source.name  # a method in torch 2.11
    return str(name() if callable(name) else name)


@contextlib.contextmanager
def _formatting_as_python_does() -> Iterator[None]:
    """A symbolic float in an f-string is formatted when the step runs (Dynamo forgets the format)."""
    own = InstructionTranslatorBase._format_value
    typed = "python_type" in vars(StringFormatVariable)  # not in torch 2.11: who asks for it breaks the graph
    make: Callable[..., VariableTracker] = StringFormatVariable.create
    asks_for_translator = "tx" in inspect.signature(make).parameters  # since torch 2.15

    def format_value(translator: InstructionTranslatorBase, spec: VariableTracker, flags: int) -> None:
        value = translator.stack[-1].realize()
        if isinstance(value, SymNodeVariable) and isinstance(value.sym_num, torch.SymFloat):
            form = "{:" + spec.as_python_constant() + "}"
            first = (translator,) if asks_for_translator else ()
            translator.stack[-1] = make(*first, form, [value], {})
        else:
            own(translator, spec, flags)

    InstructionTranslatorBase._format_value = format_value  # type: ignore[assignment, method-assign]
    if not typed:
        StringFormatVariable.python_type = lambda _: str  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        InstructionTranslatorBase._format_value = own  # type: ignore[method-assign]
        if not typed:
            del StringFormatVariable.python_type


def _float_symbols(graph_module: torch.fx.GraphModule) -> list[str]:
    """The names of the symbols of Python floats that a graph of Dynamo's is given."""
    examples = (node.meta.get("example_value") for node in graph_module.graph.find_nodes(op="placeholder"))
    numbers = (getattr(example, "item_memo", None) for example in examples if isinstance(example, FakeTensor))
    return [_node(number)._expr.name for number in numbers if isinstance(number, torch.SymFloat)]


def _node(number: torch.SymInt | torch.SymFloat) -> Any:
    """What a symbolic number is made of; since torch 2.14 its type says that parts may be ``None``, which none is here."""
    return number.node


def sizes_from_floats(graph_module: torch.fx.GraphModule) -> bool:
    """Whether a tensor in a graph of Dynamo's has a size that is computed from a Python float."""
    examples = (node.meta.get("example_value") for node in graph_module.graph.nodes)
    shapes = (example.shape for example in tree_leaves(list(examples)) if isinstance(example, torch.Tensor))
    sizes = (expression(size) for shape in shapes for size in shape if isinstance(size, torch.SymInt))
    return any(symbol_is_type(symbol, SymT.FLOAT) for size in sizes for symbol in free_symbols(size))


def floats_as_constants(graph_module: torch.fx.GraphModule) -> None:
    """While Dynamo's backend runs: have the frame captured once more with its Python floats as constants, if it has any left.

    Raises:
        BaseException: that tells Dynamo so; it must get there.
    """
    names = [name for name in _float_symbols(graph_module) if not TensorifyState.should_specialize(name)]
    for name in names:
        TensorifyState.specialize(name)
    if names:
        raise TensorifyScalarRestartAnalysis
    TensorifyState.clear()


@contextlib.contextmanager
def _floats_stay() -> Iterator[None]:
    """Python floats enter ops as they do in eager mode, in double precision, and are not made tensors of the result's type."""
    before = os.environ.get(_TENSORIFY)
    os.environ[_TENSORIFY] = "0"
    try:
        yield
    finally:
        os.environ.pop(_TENSORIFY)
        if before is not None:
            os.environ[_TENSORIFY] = before


_TENSORIFY = "TENSORIFY_PYTHON_SCALARS"

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_settings() -> str:
    """What is set of the device's caching allocator, as in its environment variable: at run time, or else there."""
    asked = getattr(torch._C, "_accelerator_getAllocatorSettings", str)() or ""
    return asked or next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "")


def set_allocator_settings(text: str) -> None:
    """Set the caching allocator while it runs: what is allocated from now on follows it.

    Raises:
        RuntimeError: for what this release of torch does not accept.
    """
    torch._C._accelerator_setAllocatorSettings(text)


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """All tensors in nested containers, and in the attributes of objects such as a batch class of the user's own.

    Modules, and what is reached a second time, are left out.
    """
    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def collect(tree: Any, depth: int) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                found.append(leaf)
            elif depth < _DEEPEST and id(leaf) not in seen and not isinstance(leaf, _NO_BATCH):
                seen.add(id(leaf))
                collect(_attributes(leaf), depth + 1)

    collect(tree, 0)
    return found


def _attributes(value: Any) -> list[Any]:
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = {name for own in slots for name in ((own,) if isinstance(own, str) else own)} - {"__dict__", "__weakref__"}
    return [*(getattr(value, name, None) for name in sorted(names)), *getattr(value, "__dict__", {}).values()]


_NO_BATCH = (type, types.ModuleType, types.FunctionType, torch.nn.Module)
_DEEPEST = 4
"""Objects inside of objects in which tensors are looked for: a graph batch keeps them in a mapping of a store of its own."""


def hint(value: Any) -> Any:
    """The value that a symbolic number had when it was captured (1 where it is not known before the step runs).

    ``int(value)`` would tie the captured graph to it.
    """
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    return 1 if value.node.hint is None else value.node.hint


def expression(value: Any) -> Any:
    """The expression of a symbolic number; ``None`` for a plain value."""
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else None


def free_symbols(expression: Any) -> set[Any]:
    """The symbols of an expression."""
    return set(expression.free_symbols)


def substitute(expression: Any, values: Mapping[Any, int]) -> Any:
    """An expression's value, as a plain number."""
    found = expression.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    return int(found) if found.is_integer else bool(found) if found.is_Boolean else float(found)


def largest(value: torch.SymInt) -> int | None:
    """The most that a symbolic size may be in the captured graph; ``None`` where it is not bounded."""
    node = _node(value)
    upper = node.shape_env.bound_sympy(node.expr).upper
    return None if upper == int_oo else int(upper)


def computed(graph: torch.fx.Graph, expression: Any, symbols: Mapping[Any, torch.fx.Node]) -> torch.fx.Node:
    """Nodes that compute an expression of the values of other nodes; returns the last."""
    before = set(graph.nodes)
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: torch.fx.Proxy(node, tracer) for symbol, node in symbols.items()}
    found = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    assert isinstance(found, torch.fx.Proxy), expression
    for node in graph.nodes:
        if node not in before:
            values = torch.fx.node.map_arg(node.args, lambda source: source.meta["val"])
            node.meta["val"] = node.target(*values)
    return found.node


def capture_failures() -> Counter[str]:
    """Why Dynamo did not capture things, and how often, in this process so far; each reason begins with a line for people."""
    errors = [f"{m.fail_type}: {m.fail_reason}" for m in dynamo_utils.get_compilation_metrics() if m.fail_type]
    return Counter(dynamo_counters["graph_break"]) + Counter(errors)


def recapture_reason(since: float) -> str:
    """The condition that failed when a frame was captured anew since then (in seconds of ``time.time``), and the line of code
    that it is for, in Dynamo's words; "" where they are not known.
    """
    recent = [
        metrics for metrics in dynamo_utils.get_compilation_metrics() if (metrics.start_time_us or 0) >= since * 1e6
    ]
    reasons = [metrics.recompile_reason for metrics in recent if metrics.recompile_reason]
    _number, _, condition = reasons[-1].splitlines()[0].partition(": ") if reasons else ("", "", "")
    return " ".join(condition.split())


def on_backward(
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    told: Callable[[frozenset[int], dict[int, Given], dict[int, torch.Tensor], Any], None],
    ported: Callable[[], dict[int, torch.Tensor]] = dict,
) -> None:
    """Call ``told`` when a backward begins of what a captured function made; gradients are enabled in it where it is to be
    differentiated.

    It is told the positions of the outputs that the backward does not come through (their gradients are nothing, not zeros),
    how the gradients of the others lie, by position, those that autograd does not hand over, which ``ported`` gives then, and
    the node of autograd's graph.
    """
    nodes: dict[Any, list[tuple[int, int]]] = {}
    earlier = {captured_node(value)[0] for value in inputs}  # what is handed out of these comes from elsewhere
    for position, output in enumerate(outputs):
        node, number = captured_node(output)
        if node is not None and node not in earlier:
            nodes.setdefault(node, []).append((position, number))

    def before(places: Sequence[tuple[int, int]], of: Callable[[], Any], gradients: Sequence[Any]) -> None:
        others = ported()
        given = {position: others.get(position, gradients[number]) for position, number in places}
        unused = frozenset(position for position, gradient in given.items() if gradient is None)
        lie: dict[int, Given] = {}
        for position, gradient in given.items():
            if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
                lie[position] = tuple(gradient.shape), gradient.stride()
        told(unused, lie, others, of())

    for node, places in nodes.items():  # a hook is the node's, and must not keep it alive
        node.register_prehook(functools.partial(before, places, weakref.ref(node)))


def captured_node(output: Any) -> tuple[Any, int]:
    """The node of autograd's graph that a captured function's output comes from, and the output's number there.

    AOTAutograd makes outputs that share memory from one of them, outside of what it captures: between such a view and the
    captured function are nodes of their own. ``None`` for what has no gradient or comes from no captured function.
    """
    node = output.grad_fn if isinstance(output, torch.Tensor) else None
    number = output.output_nr if node is not None else 0
    while node is not None and not isinstance(node, BackwardCFunction):
        node, number = node.next_functions[0] if len(node.next_functions) == 1 else (None, 0)
    return node, number


def accumulates_into(parameter: torch.Tensor) -> bool:
    """Whether the backward that runs now adds to the parameter's gradient (``torch.autograd.grad`` does not)."""
    if torch.is_grad_enabled():  # it is to be differentiated
        return False
    return is_to_run(torch.autograd.graph.get_gradient_edge(parameter).node)


def is_to_run(node: Any) -> bool:
    """Whether a node of autograd's graph is part of the backward that runs now."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # "A leaf node was passed ... but we are currently running autograd.grad()"
        return False


def autocast_region(kind: str) -> Any:
    """Tells regions of autocast apart: what it caches for each, a node of autograd's graph that casts a tensor of our own."""
    if kind not in _CASTED:
        _CASTED[kind] = tuple(torch.zeros(1, 1, device=kind, requires_grad=True) for _ in range(2))
    with torch.enable_grad():
        return torch.mm(*_CASTED[kind]).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


_CASTED: dict[str, tuple[torch.Tensor, ...]] = {}
"""By the type of the device."""


Sources = Mapping[tuple[Any, int], Collection[Any]]
"""By the inputs of autograd's nodes, the nodes that hand gradients to them."""


def sources_of_gradients() -> list[Sources] | None:
    """Of the backwards that run now, of what each comes from; what they leave out, asked for some gradients alone, is among it.

    ``None`` where it is not known, since none was begun from Python.
    """
    begun = [one for frame in sys._current_frames().values() for one in _begun(frame)]
    return [_sources(one) for one in begun] or None


def _begun(frame: types.FrameType | None) -> Iterator[Any]:
    """What the backwards come from that a thread is in."""
    code = inspect.unwrap(_engine_run_backward).__code__
    while frame is not None:
        if frame.f_code is code:
            yield from frame.f_locals["t_outputs"]
        frame = frame.f_back


_SOURCES: MutableMapping[torch.Tensor, tuple[Any, Sources]] = WeakTensorKeyDictionary()
"""Of tensors that a backward has come from: what they were computed by, and its sources. (Kept no longer than they are, with
all that they were computed by.)
"""


def _sources(root: Any) -> Sources:
    first = root.grad_fn if isinstance(root, torch.Tensor) else root.node
    known, sources = _SOURCES.get(root, (None, {})) if isinstance(root, torch.Tensor) else (None, {})
    if first is None or known is first:
        return sources
    found: dict[tuple[Any, int], list[Any]] = {}
    left, seen = [first], {first}
    while left:
        node = left.pop()
        for edge in node.next_functions:
            if edge[0] is not None:
                found.setdefault(edge, []).append(node)
                if edge[0] not in seen:
                    seen.add(edge[0])
                    left.append(edge[0])
    if isinstance(root, torch.Tensor):
        _SOURCES[root] = first, found
    return found


def backward_number() -> int:
    """Which backward runs now on this thread; -1 where none does."""
    return int(torch._C._current_graph_task_id())


def is_whole_function(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether no other graph of the same call leads to or from a captured one, as far as can be told while it is captured."""
    reason = getattr(module, "compile_subgraph_reason", None)
    whole = reason is not None and not reason.graph_break
    return whole and not any(isinstance(value, torch.Tensor) and value.grad_fn is not None for value in inputs)


def ends_function(module: torch.fx.GraphModule, code: types.CodeType | None, function: Callable[..., Any]) -> bool:
    """Whether nothing of a function follows after a graph that Dynamo has found in a frame of this code.

    What Dynamo goes on with after a break begins on the same line as the function. A frame of another function is one that
    was called by something that Dynamo has left alone.
    """
    reason = getattr(module, "compile_subgraph_reason", None)
    return reason is not None and not reason.graph_break and code is not None and is_code_of(code, function)


def is_code_of(code: types.CodeType, function: Callable[..., Any]) -> bool:
    """Whether a frame of this code is the function, or what Dynamo goes on with after a break in it."""
    plain = type(function).forward if isinstance(function, torch.nn.Module) else function
    own = getattr(getattr(plain, "__func__", plain), "__code__", None)
    return own is not None and (code.co_filename, code.co_firstlineno) == (own.co_filename, own.co_firstlineno)


def lead_only_to(nodes: Collection[Any], leaves: Iterable[torch.Tensor]) -> bool:
    """Whether a backward of these tensors adds to no gradient but through these nodes of autograd's graph."""
    left = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
    seen = set(nodes)
    while left:
        node = left.pop()
        if node in seen:
            continue
        if not node.next_functions:  # adds to a gradient
            return False
        seen.add(node)
        left.extend(following for following, _ in node.next_functions if following is not None)
    return True


def keep_saved(node: Any) -> None:
    """What a node of a captured function has saved outlives its first backward, so that a second one may come through it."""
    type(node).saved_tensors = property(lambda own: vars(own).get(_KEPT) or _saved_tensors(own))
    setattr(node, _KEPT, _saved_tensors(node))


def needs_kept(node: Any) -> bool:
    """Whether a backward can only come through a node because of `keep_saved`: autograd has given up what the node had saved,
    or it was written to since. (It may all be there still: ``retain_graph=True``.)
    """
    if not hasattr(node, _KEPT):
        return False
    try:
        _saved_tensors(node)
    except RuntimeError:
        return True
    delattr(node, _KEPT)
    return False


_KEPT = "_lightning_remat_kept"
_saved_tensors = vars(torch._C._FunctionBase)["saved_tensors"].__get__


def runs_in_forward(node: torch.fx.Node) -> bool:
    """Whether AOTAutograd has noted that a node of its joint graph comes from the forward."""
    return node.meta.get("partitioner_tag") in ("is_forward", "must_be_in_forward")


def output_of_tangent(node: torch.fx.Node) -> int | None:
    """The position among a captured function's outputs of the one whose gradient a tangent is; ``None`` for others."""
    return _output_of(node.meta.get("desc"))


def _output_of(description: Any) -> int | None:
    output = getattr(description, "output", None)
    if isinstance(output, IntermediateBaseAOTOutput):  # of several outputs that are views of one tensor
        output = output.base_of
    return output.idx if isinstance(output, PlainAOTOutput) else None


def argument_of(description: Any) -> int | None:
    """The position, among the arguments of a captured function, of what a description of a primal or a gradient is about.

    ``None`` for what AOTAutograd has made of arguments: one base of several that share memory and of which one is written
    to, the parts of a tensor subclass.
    """
    if isinstance(description, GradAOTOutput):
        description = description.grad_of
    return description.idx if isinstance(description, PlainAOTInput) else None


def is_parameter(description: Any, arguments: Sequence[bool]) -> bool:
    """Whether a primal is a parameter, or made of one (the first of several): ``arguments`` tells for a function's arguments.

    Parameters that the captured module holds itself are none of these.
    """
    while (outer := getattr(description, "base_of", None) or getattr(description, "base", None)) is not None:
        description = outer
    if isinstance(description, PlainAOTInput):
        return description.idx < len(arguments) and arguments[description.idx]
    return isinstance(description, ParamAOTInput)


def overwritten(description: Any) -> Any:
    """The description of the primal that an output is the new value of; ``None`` for other outputs."""
    if isinstance(description, SubclassGetAttrAOTOutput):
        whole = overwritten(description.base)
        return None if whole is None else SubclassGetAttrAOTInput(whole, description.attr)
    return description.mutated_input if isinstance(description, InputMutationAOTOutput) else None


def copied(value: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, those of an expanded tensor too."""
    with torch.no_grad():
        once = value
        for dim, stride in enumerate(value.stride()):
            if stride == 0:
                once = once.narrow(dim, 0, min(1, once.size(dim)))
        copy = torch.empty_strided(once.shape, once.stride(), dtype=value.dtype, device=value.device)
        return copy.copy_(once).expand(value.shape)


@contextlib.contextmanager
def _quiet_dynamo() -> Iterator[None]:
    """Let Dynamo's loggers and warnings through only where the user asked for them (``TORCH_LOGS``, a level set)."""
    logger, warn_once = logging.getLogger("torch._dynamo"), dynamo_utils.warn_once
    dynamo_utils.warn_once = lambda message, *_args, **_kwargs: logger.info("%s", message)
    try:
        with _silent_loggers():
            yield
    finally:
        dynamo_utils.warn_once = warn_once


@contextlib.contextmanager
def _silent_loggers() -> Iterator[None]:
    """Dynamo's loggers say nothing, but where the user asked for it."""
    logger = logging.getLogger("torch._dynamo")
    # torch 2.11 cannot log its own settings, and calls that an error. (To set a level costs half a millisecond a step.)
    loggers = [] if logger.level else _dynamo_loggers(len(logger.manager.loggerDict))
    silent = [one for one in loggers if not one.level and not one.disabled]
    for one in silent:
        one.disabled = True
    try:
        yield
    finally:
        for one in silent:
            one.disabled = False


@functools.lru_cache(maxsize=1)
def _dynamo_loggers(_known: int) -> list[logging.Logger]:
    """Dynamo's loggers; looked up again when there are more loggers than there were."""
    loggers = logging.getLogger().manager.loggerDict.items()
    its = ("torch._dynamo", "torch._subclasses.fake_tensor")  # the second, since torch 2.14, of an op that raises
    return [one for name, one in loggers if name.startswith(its) and isinstance(one, logging.Logger)]


@contextlib.contextmanager
def _as_in_eager_mode() -> Iterator[None]:
    """Dynamo takes ``torch.addcdiv`` apart, and rounds otherwise then; there is no setting for it. And a step that asks whether
    it is compiled is told no (`_answer`): it would compute in another way than in eager mode.
    """
    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    before = dict(handlers)
    handlers.pop(torch.addcdiv, None)
    for question in _IS_COMPILED:
        handlers[question] = functools.partial(_answer, before[question])
    for layers in _RECURRENT:
        handlers[layers] = _recurrent
    handlers[assert_async] = _asserted
    handlers[torch._assert] = functools.partial(_asserted_at_once, before[torch._assert])
    try:
        yield
    finally:
        handlers.clear()
        handlers.update(before)


_IS_COMPILED = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch._dynamo.external_utils.is_compiling,
    torch._utils.is_compiling,
)
_MAY_KNOW = (str(Path(torch.__file__).parent), f"{os.sep}transformers{os.sep}")
"""Who asks to know what can be traced. Without the answer transformers' models come apart into single layers; where they
compute in another way for it is a known difference (docs/training.md).
"""


def _answer(own: Callable[..., Any], asked: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    """No; but who asks to know what can be traced gets Dynamo's ``own`` answer."""
    if any(place in translator.f_code.co_filename for place in _MAY_KNOW):
        return own(asked, translator, *args, **kwargs)
    return VariableTracker.build(translator, False)


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def _recurrent(asked: Any, _translator: Any, x: Any, *_others: Any, **_named: Any) -> None:
    """Recurrent layers are traced as they are on the CPU, and left alone elsewhere. (The modules see to packed sequences.)"""
    if x.as_proxy().node.meta["example_value"].device.type != "cpu":
        unimplemented(
            gb_type="recurrent layer",
            context=str(asked),
            explanation="It is left alone: off the CPU, its dropout and its weights are cuDNN's own, which no graph holds.",
            hints=[],
        )


def _asserted(_function: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of ``torch._assert_async``; an ``assert`` is traced to the function itself (see ``_effects.name_assertions``)."""
    given = [*args, *(kwargs[name] for name in ("input", "assert_msg") if name in kwargs)]
    packet = torch.ops.aten._assert_async
    op = VariableTracker.build(translator, packet.msg if len(given) > 1 else packet.default)
    return op.call_function(translator, given, {})


def _asserted_at_once(own: Callable[..., Any], function: Any, translator: Any, condition: Any, message: Any) -> Any:
    """A call of ``torch._assert``, which is an ``assert``."""
    if not isinstance(condition, TensorVariable):
        return own(function, translator, condition, message)
    op = VariableTracker.build(translator, torch.ops.lightning_remat.assertion.default)
    return op.call_function(translator, [condition, message], {})


def logging_calls() -> set[Any]:
    """Calls that only say something: the loggers' own, and what libraries hang on them (transformers' ``warning_once``)."""
    said = {"debug", "info", "warning", "warn", "error", "critical", "exception", "log"}
    methods = vars(logging.Logger).items()
    own = {method for name, method in methods if name in said}
    hung = {method for _, method in methods if callable(method) and getattr(method, "__module__", "") != "logging"}
    return own | hung | {warnings.warn}


def given(node: torch.fx.Node) -> tuple[Source, Callable[[torch.Tensor], Any]] | None:
    """While Dynamo traces: the tensor given to the step that a node is, or is a size of, and how it comes from that."""
    argument, example = node.meta.get("grapharg"), node.meta.get("example_value")
    if isinstance(example, torch.SymInt):
        size = _node(example)
        sources = size.shape_env.var_to_sources.get(size.expr, ())
        for source in sources:
            if isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE:
                return source.base, operator.methodcaller("size", source.idx)
    elif argument is not None and argument.source is not None and isinstance(example, torch.Tensor):
        return argument.source, _itself
    return None


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def given_now(graph: torch.fx.Graph, source: Source) -> torch.Tensor | None:
    """While Dynamo traces: the real tensor there; ``None`` where its graph does not have it."""
    for node in graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        if argument is not None and argument.source == source and isinstance(argument.example, torch.Tensor):
            return argument.example
    return None


def guard_on(source: Source, question: Callable[[Any], bool], answer: bool, words: str) -> None:
    """While Dynamo traces: what is captured holds as long as the value given there has this answer."""

    def VALUE_MATCH(builder: Any, guard: Any) -> None:  # noqa: N802 - Dynamo's guards are named so
        def check(value: Any) -> bool:
            with torch.no_grad():
                return question(value) == answer

        builder.get_guard_manager(guard).add_lambda_guard(check, [words], guard.user_stack)

    install_guard(source.make_guard(VALUE_MATCH))


class _Asking:
    """Which of some parameters ask for gradients; those that are gone do not."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]

    def now(self) -> list[bool]:
        """One a parameter."""
        found = [parameter() for parameter in self._parameters]
        return [one is not None and one.requires_grad for one in found]


def guard_on_gradients(inputs: Sequence[Any]) -> None:
    """While Dynamo's backend runs: what is captured holds as long as the same parameters ask for gradients.

    torch 2.11 does not look, and goes on with the graph in which a parameter was frozen: it would never be trained. (2.12 was
    not tried.)
    """
    parameters = [value for value in inputs if isinstance(value, torch.nn.Parameter)]
    if parameters and torch.__version__.startswith(("2.11.", "2.12.")):
        asking = _Asking(parameters)
        output = InstructionTranslator.current_tx().output
        source = GlobalSource(output.install_global_by_id("lightning_remat", asking))
        guard_on(source, _Asking.now, asking.now(), "which parameters ask for gradients")  # type: ignore[arg-type]


def source_name(source: Source) -> str:
    """Where something given to the step is found, in Dynamo's words; see `found_at`."""
    return _name_of(source)


def found_at(place: str, arguments: Mapping[str, Any]) -> Any:
    """What is found there among a function's arguments.

    Raises:
        NameError: for what is no argument's.
    """
    return eval(
        place, dict(_get_closure_vars()), {"L": arguments}
    )  # an expression that Dynamo has written, as its guards are


def build_attribute(translator: Any, owner: Any, name: str) -> Any:
    """While Dynamo traces: an attribute of an object of ours, as an input of the step."""
    source = AttrSource(GlobalSource(translator.output.install_global_by_id("lightning_remat", owner)), name)
    return VariableTracker.build(translator, getattr(owner, name), source)


def absent(source: Source, name: str) -> None:
    """While Dynamo traces: what is captured holds as long as the object given there has no such attribute of its own."""
    install_guard(source.make_guard(functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)))


def is_size(variable: Any) -> bool:
    """While Dynamo traces: whether a variable is a symbolic size of what the step is given, or computed from such alone."""
    number = getattr(variable, "sym_num", None)
    if not isinstance(number, torch.SymInt):
        return False
    node = _node(number)
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


def profiling() -> bool:
    """Whether a torch profiler records on this thread."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def profiling_anywhere() -> bool:
    """Whether one records on any thread."""
    return bool(getattr(autograd_profiler, "_is_profiler_enabled", False))


def profilers_counting() -> Collection[str]:
    """What counts the steps of torch's profilers, by name."""
    return dict(getattr(autograd_profiler.KinetoStepTracker, "_step_dict", {}))


def reconstruct_as(codegen: Any, kind: type, variable: VariableTracker) -> None:
    """In the code that Dynamo writes around a graph: what a variable stands for, as one of this type of a module's."""
    codegen.add_push_null(lambda: codegen.load_import_from(kind.__module__, kind.__name__))
    codegen(variable)
    codegen.extend_output(create_call_function(1, False))


_UNLIMITED = 1 << 30


def tracing(dynamic_sources: str = "", floats: VaryingFloats | None = None) -> contextlib.AbstractContextManager[Any]:
    """Dynamo's settings while it captures.

    Recompilation is never silently given up (who calls this counts shapes itself), an error inside Dynamo makes the frame
    run as before, a logging call does not break the graph, DDP does not split it, and NumPy stays NumPy (torch's own
    version of it rounds otherwise), ``torch.autograd.grad`` is part of the graph (a gradient penalty is one graph then, not
    two of which the first cannot be differentiated twice), and Dynamo's warnings stay off the terminal: what they warn of
    is no fault of the user's, and what is not captured is told by who calls this.
    """
    stack = contextlib.ExitStack()
    config = torch._dynamo.config
    settings: dict[str, Any] = {
        "recompile_limit": _UNLIMITED,
        "accumulated_recompile_limit": _UNLIMITED,
        "suppress_errors": True,
        "optimize_ddp": False,
        "trace_numpy": False,
        "enable_dynamo_decompositions": False,  # `add_` with `alpha` in two roundings, for one
        "trace_autograd_ops": True,
        "allow_rnn": True,  # see `_recurrent`
    }
    for name in ("ignore_logging_functions", "ignore_logger_methods"):
        if hasattr(config, name):
            settings[name] = set(getattr(config, name)) | logging_calls()
            break
    stack.enter_context(uncollected())
    stack.enter_context(config.patch(settings))
    # Two sizes that were equal when the step was captured are two symbols: they need not be the next time.
    stack.enter_context(symbolic_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
    stack.enter_context(_quiet_dynamo())
    stack.enter_context(_as_in_eager_mode())
    stack.enter_context(_grouped_products())
    if floats is not None:
        stack.enter_context(floats.symbolic())
    if dynamic_sources:
        patch = torch.compiler.config.patch  # type: ignore[attr-defined]
        stack.enter_context(patch(dynamic_sources=dynamic_sources))
    return stack
