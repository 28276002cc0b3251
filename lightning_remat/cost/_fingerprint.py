"""What measured costs depend on besides the operation: the device's model, versions, and settings of kernels."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import torch

from lightning_remat._settings import setting
from lightning_remat._version import __version__

_GENERAL = (
    "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "utils.deterministic.fill_uninitialized_memory",
    "get_float32_matmul_precision",
    "backends.fp32_precision",
)
# There are two ways to ask for TF32: kernels read the newer setting, and the older one sets it too.
_CUDA = (
    "backends.cudnn.version",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.benchmark_limit",
    "backends.cudnn.deterministic",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.preferred_linalg_library",
    "backends.cuda.preferred_blas_library",
)
_CUDA_ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_LAUNCH_BLOCKING",
    "DISABLE_ADDMM_CUDA_LT",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_USE_HEURISTIC_MODE_B",
    "TORCH_CUDNN_V8_API_DISABLED",
)
_CPU = (
    "backends.cpu.get_cpu_capability",
    "backends.mkldnn.enabled",
    "backends.mkldnn.deterministic",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
    "get_num_threads",
)
_CPU_ENVIRONMENT = (
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)


def fingerprint(device: torch.device) -> dict[str, str]:
    """The device's model, torch's version, this package's, and the settings that choose between kernels, by name.

    Which attention is dispatched (``torch.backends.cuda.enable_flash_sdp`` and its like) is not among them: what is captured
    and measured is the kernel that it came to.
    """
    on_cuda = device.type == "cuda"
    settings = (*_GENERAL, *(_CUDA if on_cuda else _CPU))
    variables = _CUDA_ENVIRONMENT if on_cuda else _CPU_ENVIRONMENT
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else cpu_name(),
        "torch": str(torch.__version__),
        "lightning_remat": __version__,
        **{path: setting(path) for path in settings},
        **{name: os.environ.get(name, "") for name in variables},
    }


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
