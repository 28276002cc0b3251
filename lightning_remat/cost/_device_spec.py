"""Published peak figures of devices, for estimates of time (see `roofline`)."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping

import torch

from lightning_remat.errors import ConfigError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DeviceSpec:
    """What a device can do at best.

    Attributes:
        name: how it is asked for, such as ``"A100-80"``.
        flops_per_second: FLOP/s of products, by the dtype of their factors: accumulating in float32 for the 16-bit
            types, without sparsity; float32 without TF32. A dtype that is not listed computes at the rate of float32.
        bytes_per_second: bandwidth of its memory.
        launch_seconds: the least time any op takes, which is that of launching it.
    """

    name: str
    flops_per_second: Mapping[torch.dtype, float]
    bytes_per_second: float
    launch_seconds: float

    def flops_of(self, dtype: torch.dtype) -> float:
        """FLOP/s for this dtype."""
        return self.flops_per_second.get(dtype, self.flops_per_second[torch.float32])


def _gpu(name: str, *, f64: float, f32: float, f16: float, bf16: float | None, gigabytes: float) -> DeviceSpec:
    """An entry of the table, in TFLOP/s and GB/s (10^9 bytes) as data sheets have them."""
    rates = {torch.float64: f64, torch.float32: f32, torch.float16: f16, torch.bfloat16: bf16 or f32}
    return DeviceSpec(name, {kind: 1e12 * rate for kind, rate in rates.items()}, 1e9 * gigabytes, 5e-6)


# NVIDIA's data sheets and architecture white papers; V100, A100, H100 and H200 are SXM modules unless the name says
# PCIe. 16-bit rates are those of tensor cores, dense, where there are any. The launch time is a round figure for eager
# PyTorch.
_GPUS = (
    _gpu("P100", f64=4.7, f32=9.3, f16=18.7, bf16=None, gigabytes=732),  # PCIe
    _gpu("T4", f64=0.25, f32=8.1, f16=65, bf16=None, gigabytes=320),
    _gpu("V100", f64=7.8, f32=15.7, f16=125, bf16=None, gigabytes=900),
    _gpu("A100-40", f64=9.7, f32=19.5, f16=312, bf16=312, gigabytes=1555),
    _gpu("A100-80", f64=9.7, f32=19.5, f16=312, bf16=312, gigabytes=2039),
    _gpu("H100", f64=34, f32=67, f16=989, bf16=989, gigabytes=3350),
    _gpu("H100-PCIe", f64=26, f32=51, f16=756, bf16=756, gigabytes=2000),
    _gpu("H200", f64=34, f32=67, f16=989, bf16=989, gigabytes=4800),
    _gpu("L4", f64=0.47, f32=30.3, f16=121, bf16=121, gigabytes=300),
    _gpu("RTX-3090", f64=0.56, f32=35.6, f16=71, bf16=71, gigabytes=936),
    _gpu("RTX-4090", f64=1.29, f32=82.6, f16=165, bf16=165, gigabytes=1008),
)
# No data sheet stands behind this one: round figures for a desktop processor, for comparing ops with each other.
_CPU = DeviceSpec("cpu", {torch.float32: 200e9, torch.float64: 100e9}, 25e9, 3e-6)
_TABLE = {spec.name.lower(): spec for spec in (*_GPUS, _CPU)}

# How `torch.cuda.get_device_name` names them; the first match counts.
_CUDA_NAMES = (
    (r"\bP100", "P100"),
    (r"\bT4\b", "T4"),
    (r"\bV100", "V100"),
    (r"\bA100.*80GB", "A100-80"),
    (r"\bA100", "A100-40"),
    (r"\bH100.*PCIe", "H100-PCIe"),
    (r"\bH100", "H100"),
    (r"\bH200", "H200"),
    (r"\bL4\b", "L4"),
    (r"\bRTX 3090", "RTX-3090"),
    (r"\bRTX 4090", "RTX-4090"),
)
_UNKNOWN_CUDA = "A100-40"


def device_specs() -> tuple[str, ...]:
    """The names that `device_spec` knows."""
    return tuple(spec.name for spec in _TABLE.values())


def device_spec(device: str | torch.device) -> DeviceSpec:
    """The figures of a device of the table.

    Args:
        device: a name of the table (upper or lower case), or a torch device (as a string too: ``"cuda"``,
            ``"cuda:1"``), which is looked up by the name that its driver gives. A CUDA device that is not in the table
            is taken for an A100 with 40 GB, and a warning in the log says so.

    Raises:
        ConfigError: for an unknown name, or a torch device other than ``cpu`` and ``cuda``.
    """
    if isinstance(device, torch.device) or device.partition(":")[0] == "cuda":
        device = torch.device(device)
        if device.type == "cuda":
            return _TABLE[cuda_spec_name(torch.cuda.get_device_name(device)).lower()]
        device = device.type
    found = _TABLE.get(device.strip().lower())
    if found is None:
        raise ConfigError(
            f"no figures for device {device!r}: give one of {', '.join(device_specs())}, or a DeviceSpec of your own"
        )
    return found


def cuda_spec_name(device_name: str) -> str:
    """The table's name for a CUDA device, by the name that its driver gives; an A100's, with a warning, for others."""
    for pattern, name in _CUDA_NAMES:
        if re.search(pattern, device_name, re.IGNORECASE):
            return name
    log.warning("No published figures for %r are known here: those of the %s stand in.", device_name, _UNKNOWN_CUDA)
    return _UNKNOWN_CUDA
