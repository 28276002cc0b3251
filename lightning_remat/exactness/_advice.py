"""Advice for a step whose bits differ: which of torch's settings to change."""

from __future__ import annotations

import dataclasses
import os

import torch

from lightning_remat._settings import setting
from lightning_remat.exactness._trace import Cause, FirstDifference

DETERMINISTIC = (
    "torch.use_deterministic_algorithms(True), with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before CUDA is used "
    "(Trainer(deterministic=True) does both)"
)
WITHOUT_WARN_ONLY = (
    "torch.use_deterministic_algorithms(True) without warn_only=True (and not Trainer(deterministic='warn')), which leaves "
    "flash and memory-efficient attention as they are"
)
WORKSPACE = (
    "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before CUDA is used: cuBLAS is not deterministic without"
)
CUDNN_ATTENTION = (
    "torch.backends.cuda.enable_cudnn_sdp(False): the backward of cuDNN's attention is not deterministic, and other kernels "
    "take its place then"
)
BENCHMARK = "torch.backends.cudnn.benchmark = False: it chooses kernels for convolutions by the time that they take"
TF32 = (
    "torch.set_float32_matmul_precision('highest') and torch.backends.cudnn.allow_tf32 = False, to see whether TF32 is what "
    "differs"
)
LEAVE_OUT = (
    "until this is repaired (please report it, with this check's file), torch.compiler.disable on the forward of {module} has "
    "it run as in eager mode"
)

NOT_OF_TORCH = "{op} is no operation of torch's own: its authors know whether it has a deterministic form"

_MATRIX_PRODUCTS = (*("mm", "addmm", "bmm", "baddbmm", "matmul", "linear"), *("convolution", "conv", "einsum"))

_OF_TORCH = ("aten.", "prims.", "torch.", "c10d.", "_c10d_functional.")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of torch that bits depend on.

    Attributes:
        cuda: whether anything runs on a CUDA device.
        deterministic, warn_only: what `torch.use_deterministic_algorithms` was called with.
        workspace: whether ``CUBLAS_WORKSPACE_CONFIG`` is set.
        cudnn_attention: whether cuDNN's attention may be chosen.
        benchmark: whether cuDNN's kernels are chosen by time.
        tf32: whether products of float32 matrices may be computed in TF32.
    """

    cuda: bool
    deterministic: bool
    warn_only: bool
    workspace: bool
    cudnn_attention: bool
    benchmark: bool
    tf32: bool

    @classmethod
    def now(cls, cuda: bool) -> Settings:
        """The present settings of this process."""
        return cls(
            cuda=cuda,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            workspace="CUBLAS_WORKSPACE_CONFIG" in os.environ,
            cudnn_attention=torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
            benchmark=torch.backends.cudnn.benchmark,
            tf32=any(setting(path) in values for path, values in _TF32.items()),
        )


_TF32 = {
    "get_float32_matmul_precision": ("high", "medium"),
    "backends.cudnn.allow_tf32": ("True",),
    "backends.cuda.matmul.fp32_precision": ("tf32",),
    "backends.cudnn.conv.fp32_precision": ("tf32",),
    "backends.cudnn.rnn.fp32_precision": ("tf32",),
}
"""By which settings torch computes in TF32. The first two are not to be read where the others were set."""


def advice(first: FirstDifference | None, repeats: bool, settings: Settings) -> tuple[str, ...]:
    """What may make the bits equal, in sentences, the likeliest first.

    Args:
        first: the operation at which bits begin to differ, if that is known.
        repeats: whether eager mode repeats its own bits.
        settings: the settings of the process.
    """
    op = first.op if first is not None else ""
    kernel = not repeats or first is None or first.cause is Cause.KERNEL
    found = _for_kernels(op, settings) if kernel else []
    if repeats and first is not None:
        found.append(LEAVE_OUT.format(module=first.module or "the module that it is of"))
    return tuple(found)


def _for_kernels(op: str, settings: Settings) -> list[str]:
    found = []
    if "." in op and not op.startswith(_OF_TORCH):
        return [NOT_OF_TORCH.format(op=op)]
    if not settings.deterministic:
        found.append(DETERMINISTIC if settings.cuda else "torch.use_deterministic_algorithms(True)")
    elif settings.warn_only:
        found.append(WITHOUT_WARN_ONLY)
    if not settings.cuda:
        return found
    if settings.cudnn_attention and ("cudnn_attention" in op or not op):
        found.append(CUDNN_ATTENTION)
    if settings.deterministic and not settings.workspace:
        found.append(WORKSPACE)
    product = _is_any(op, _MATRIX_PRODUCTS)
    if settings.benchmark and (product or not op):
        found.append(BENCHMARK)
    if settings.tf32 and product:
        found.append(TF32)
    return found


def _is_any(op: str, names: tuple[str, ...]) -> bool:
    return any(part.startswith(names) for part in op.removeprefix("aten.").lstrip("_").split(".")[:1])
