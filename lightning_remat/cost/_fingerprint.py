"""What measured costs depend on, besides the operation itself."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import torch

_GENERAL = ("utils.deterministic.fill_uninitialized_memory",)
_CUDA = (
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
)
_CPU = ("backends.mkldnn.enabled", "backends.mkldnn.conv.fp32_precision", "backends.mkldnn.matmul.fp32_precision")


def fingerprint(device: torch.device) -> dict[str, str]:
    """The device's model, torch's version and the settings that choose between kernels, by name."""
    on_cuda = device.type == "cuda"
    facts = {
        "device": torch.cuda.get_device_name(device) if on_cuda else cpu_name(),
        "torch": str(torch.__version__),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
    if on_cuda:
        facts["backends.cudnn.version"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        facts["CUBLAS_WORKSPACE_CONFIG"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    else:
        facts["threads"] = str(torch.get_num_threads())
        facts["capability"] = torch.backends.cpu.get_cpu_capability()
    return facts | {path: _setting(path) for path in (*_GENERAL, *(_CUDA if on_cuda else _CPU))}


def _setting(path: str) -> str:
    """A setting of torch, by its dotted name; the error's name where torch does not have it or refuses to read it."""
    try:
        return str(functools.reduce(getattr, path.split("."), torch))
    except (AttributeError, RuntimeError) as error:
        return type(error).__name__


@functools.cache
def cpu_name() -> str:
    """The processor's model, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
