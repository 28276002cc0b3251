"""The parts by name, in the order in which they run: what shows most for its time comes first."""

from __future__ import annotations

from benchmarks.gpu import (
    architectures,
    batch_size,
    beside_compiler,
    bits,
    gpu_tests,
    host_memory,
    out_of_memory,
    peaks,
    recordings,
    sharded,
    trainer,
)
from benchmarks.gpu.part import Part

PARTS: dict[str, Part] = {
    module.PART.name: module.PART
    for module in (
        gpu_tests,
        bits,
        out_of_memory,
        trainer,
        peaks,
        host_memory,
        recordings,
        beside_compiler,
        batch_size,
        architectures,
        sharded,
    )
}
