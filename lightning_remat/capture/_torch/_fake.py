"""Fake tensors: shapes, types and devices without memory, and with the strides that the real ones will have.

* ``FakeTensor``, ``_disable_current_modes``, ``_saved_tensors_hooks_set_tracing``: planning runs real operations in the
  middle of fake tracing, and a network larger than the memory is captured as a fake one.
* ``FakeTensorMode._dispatch_impl``: some fake results have other strides than the real ones (see ``capture._layouts`` and
  ``capture._measured_layouts``).
* ``FunctionalTensorMode.__torch_dispatch__``: where functionalization replaces an op in place (see `spaced_results`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from lightning_remat.capture._layouts import real_layout, with_narrow_gaps
from lightning_remat.capture._measured_layouts import measured_strides
from lightning_remat.capture._torch._loggers import silent_loggers
from lightning_remat.errors import CaptureError


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made inside have shapes, types and devices, and no memory: a network of any size can be captured."""
    with silent_loggers(), FakeTensorMode(allow_non_fake_inputs=True):  # an op's error is raised, not logged
        yield


def with_fakes(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], like: torch.Tensor) -> Any:
    """What a call returns for fake tensors in the place of real ones, in the mode of ``like`` where that is fake."""
    mode = like.fake_mode if isinstance(like, FakeTensor) else FakeTensorMode()
    fakes = tree_map_only(
        torch.Tensor, lambda x: x if isinstance(x, FakeTensor) else mode.from_tensor(x), (args, kwargs)
    )
    with mode:
        return call(*fakes[0], **fakes[1])


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Leave fake tensor mode: tensors made inside are real, and hooks are called with those that autograd keeps."""
    tracing = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        with _disable_current_modes():
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(tracing)


def without_functions_of_ones_own() -> contextlib.AbstractContextManager[None]:
    """While open, no mode and no class of the user's changes what torch's functions do: Dynamo has looked into these."""
    disabled: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return disabled


@contextlib.contextmanager
def real_layouts() -> Iterator[None]:
    """Trace with the strides that the real kernels give (`real_layout`), or were seen to give (`measured_strides`)."""
    original: Any = FakeTensorMode._dispatch_impl

    def dispatch(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = ruled(self, func, types, args, kwargs)
        strides = measured_strides(func, args, kwargs)
        if not strides:
            return result
        with self:
            return _lying_so(result, strides)

    def ruled(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
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


def _lying_so(result: Any, strides: Mapping[int, tuple[int, ...]]) -> Any:
    """What an op returns, with these strides for the tensors at these places."""
    places = itertools.count()

    def so(x: torch.Tensor) -> torch.Tensor:
        wanted = strides.get(next(places), x.stride())
        return x if wanted == x.stride() else torch.empty_strided(x.shape, wanted, dtype=x.dtype, device=x.device)

    return tree_map_only(torch.Tensor, so, result)


def _fake_batch_norm(dispatch: Callable[..., Any], mode: Any, types: Any, args: Any) -> tuple[Any, ...]:
    """The native batch norm's fake results, and between them cuDNN's reserve space, which torch would ask the device for.

    Without the device its size is not known: it is taken to be 0 bytes, as torch does for ``cudnn_batch_norm``.
    """
    *given, momentum, eps = args
    native = torch.ops.aten._native_batch_norm_legit_functional.default
    output, mean, invstd, *statistics = dispatch(mode, native, types, (*given, True, momentum, eps), {})
    with mode:
        reserve = torch.empty(0, dtype=torch.uint8, device=output.device)
    return output, mean, invstd, reserve, *statistics


@contextlib.contextmanager
def grouped_products() -> Iterator[None]:
    """Trace ``_grouped_mm`` (experts' products) in any dtype, as its kernel runs; the fake one takes bfloat16 alone."""
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
    """Trace what eager computes in place with the strides that its result keeps there.

    The traced op is not in place, and its fake result would be laid out anew:

    * In order, where it lay transposed: ``masked_fill``, ``tril``, random numbers (see ``rewritings._in_place``).
    * Dense, where it had gaps between rows of a wider tensor. That is for parts that are not known as views of the wider
      tensor: ``unsafe_chunk``, as ``nn.GRUCell`` uses it, gives such. Eager's kernels go from row to row, and compute the
      last elements of each, which do not fill a vector of the processor, in another way. With gaps between its rows,
      however small, the result is computed and read as eager's is.
    """
    functional: Any = FunctionalTensorMode.__torch_dispatch__
    dispatch: Any = FakeTensorMode.dispatch
    wanted: list[tuple[str, tuple[Any, Any, torch.dtype]]] = []

    def observe(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_in_place(func) and isinstance(args[0], FunctionalTensor) and _rounds_otherwise(func, args, kwargs or {}):
            raise CaptureError(
                f"{func._schema.name} writes over complex numbers on the CPU, where eager mode's kernel rounds otherwise "
                "than it does elsewhere: a step of one's own computes a new tensor instead (z = z * w)"
            )
        stride = _kept_strides(func, args[0]) if _is_in_place(func) and isinstance(args[0], FunctionalTensor) else None
        if stride is None:
            return functional(self, func, types, args, kwargs)
        wanted.append((func._schema.name, (args[0].shape, stride, args[0].dtype)))
        try:
            return functional(self, func, types, args, kwargs)
        finally:
            wanted.clear()

    def spaced(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not wanted or not isinstance(func, OpOverload):
            return dispatch(self, func, types, args, kwargs)
        if f"{func._schema.name.removesuffix('_functional')}_" != wanted[0][0]:
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


def _is_in_place(func: Any) -> bool:
    """Whether an op writes its result over its first argument, and leaves its strides as they are (``t_`` does not)."""
    if not isinstance(func, OpOverload) or not func._schema.name.endswith("_") or not func._schema.arguments:
        return False
    first = func._schema.arguments[0].alias_info
    return first is not None and first.is_write and torch.Tag.inplace_view not in func.tags


_WITHOUT_PRODUCTS = {torch.ops.aten.add_.Tensor, torch.ops.aten.sub_.Tensor, torch.ops.aten.copy_.default}


def _rounds_otherwise(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a kernel in place may have other bits than the op that functionalization puts in its place.

    Products of complex numbers are compiled for the CPU twice, for memory that overlaps and for memory that does not.
    """
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    first = tensors[0]
    if len(tensors) == 1 or not first.is_complex() or first.device.type != "cpu":
        return False
    if torch.Tag.pointwise not in func.tags and func is not torch.ops.aten.addr_.default:
        return False
    if func in _WITHOUT_PRODUCTS:
        return bool(kwargs.get("alpha", 1) != 1)
    vectors = all(one.dtype == first.dtype and one.shape == first.shape and one.is_contiguous() for one in tensors)
    return not (func is torch.ops.aten.mul_.Tensor and vectors)


def _kept_strides(func: OpOverload, x: FunctionalTensor) -> tuple[Any, ...] | None:
    """The strides with which an op in place is traced; ``None`` for those that the op not in place gives."""
    elements = torch.Tag.pointwise in func.tags and x.device.type == "cpu" and x.is_base_tensor()
    symbolic = any(type(n) is not int for n in (*x.shape, *x.stride()))
    if x.layout is not torch.strided or (symbolic and not elements):
        return None
    narrow = with_narrow_gaps(x.shape, x.stride())
    if narrow is not None:
        return narrow if elements else None
    return None if symbolic or x.is_contiguous() else x.stride()
