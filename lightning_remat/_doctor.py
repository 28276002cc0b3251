"""What this machine has and does, for people who ask for help: versions, devices, settings, caches, and a test of all of it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_remat._disk import cache_directory
from lightning_remat._rematerialize import rematerialize
from lightning_remat._settings import setting
from lightning_remat._version import __version__
from lightning_remat.budget import device_bytes
from lightning_remat.capture import _torch as internals
from lightning_remat.errors import RematError, RematWarning
from lightning_remat.exactness import check
from lightning_remat.measure import held_bytes, peak_memory
from lightning_remat.report import format_bytes

PACKAGES = ("torch", "lightning", "transformers", "networkx", "mip", "omegaconf", "numpy")

BUDGET = 0.5
"""Of what can be saved in the network of the test."""

NEAR = 0.02
"""Share of the predicted peak that the measured one may be off."""

TIME_LIMIT = 5.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of what was found.

    Attributes:
        about: what it is about, in a word or two.
        text: what was found.
        wrong: whether something does not work as it should.
    """

    about: str
    text: str
    wrong: bool = False

    def __str__(self) -> str:
        return f"{self.about}: {self.text}{' (!)' if self.wrong else ''}"


def examine(device: torch.device, *, test: bool = True, progress: Callable[[str], object] = str) -> Iterator[Finding]:
    """What is found, one thing after the other.

    Args:
        device: ``cpu``, or a CUDA device: the settings that matter there are named, and the test runs there.
        test: whether a small network is captured, planned and run, and compared with eager mode.
        progress: called with a text about the work in progress.
    """
    yield Finding("lightning_remat", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    yield Finding("packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    unknown = internals.unknown_torch()
    yield Finding(
        "torch", unknown or f"{torch.__version__} is known: its internals are where they are looked for", bool(unknown)
    )
    off = internals.turned_off() if not unknown else ""
    yield Finding("capture", f"turned off by {off}: nothing is planned" if off else "on", wrong=bool(off))
    yield from _devices(device)
    yield from _caches()
    if test and not unknown and not off:
        progress("running a small network as planned and in eager mode")
        yield from _tested(device)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices(device: torch.device) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free = format_bytes(device_bytes(torch.device("cpu"), 0.0, 0))
    yield Finding("CPU", f"{cores} cores, {torch.get_num_threads()} threads of torch, {free} free")
    for number in range(torch.cuda.device_count()):
        free_bytes, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        yield Finding(
            f"cuda:{number}",
            f"{name}, {format_bytes(free_bytes)} of {format_bytes(total)} free, CUDA {torch.version.cuda}",
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        yield Finding("CUDA", "this torch finds no CUDA device", wrong=True)
    settings = internals.allocator_settings() if not internals.unknown_torch() else "not known"
    yield Finding("allocator", settings or "torch's own settings")
    cudnn = torch.backends.cudnn
    flags = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "not set"),
        "cudnn.deterministic": cudnn.deterministic,
        "cudnn.benchmark": cudnn.benchmark,
        "products of float32": setting("backends.cuda.matmul.fp32_precision"),
        "convolutions of float32": setting("backends.cudnn.conv.fp32_precision"),
    }
    yield Finding("determinism", ", ".join(f"{name} {value}" for name, value in flags.items()))


def _caches() -> Iterator[Finding]:
    folder = cache_directory()
    existing = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    writable = os.access(existing, os.W_OK)
    sizes = [one.stat().st_size for one in folder.glob("*.json")] if folder.is_dir() else []
    text = f"{folder}, {len(sizes)} files, {format_bytes(sum(sizes))}"
    yield Finding(
        "cache", text if writable else f"{text}; it cannot be written to, and nothing is kept", wrong=not writable
    )


class _Network(nn.Module):
    """A convolution with batch norm, attention with dropout, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(32, 4, 128, dropout=0.1, activation="gelu", batch_first=True)
                for _ in range(3)
            )
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        features = self.blocks(self.stem(images).flatten(2).transpose(1, 2))
        return nn.functional.cross_entropy(self.head(features.mean(1)), classes)


def _tested(device: torch.device) -> Iterator[Finding]:
    """What becomes of a small network: it is captured, planned within half of what can be saved, compared and measured."""
    started = time.monotonic()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), warnings.catch_warnings():
            warnings.simplefilter("ignore", RematWarning)
            torch.manual_seed(0)
            network = _Network().to(device)
            batch = torch.randn(16, 3, 16, 16, device=device), torch.randint(10, (16,), device=device)
            options: dict[str, Any] = {"budget": BUDGET, "time_limit": TIME_LIMIT}
            report = check(network, *batch, **options)
            yield Finding("bits", report.summary(), wrong=not report.equal)
            yield _peak(network, batch, device, options)
    except (RematError, RuntimeError) as error:
        yield Finding("test", f"{type(error).__name__}: {' '.join(str(error).split())}", wrong=True)
    yield Finding("test", f"took {time.monotonic() - started:.1f} s on {device}")


def _peak(
    network: nn.Module, batch: tuple[torch.Tensor, ...], device: torch.device, options: dict[str, Any]
) -> Finding:
    step = rematerialize(network, **options)

    def train() -> None:
        network.zero_grad(set_to_none=True)
        step(*batch).backward()

    try:
        for _ in range(2):
            train()
        network.zero_grad(set_to_none=True)
        held = held_bytes(network, batch, device=device)
        measured = held + peak_memory(train, device)
    finally:
        step.close()
    plan = step.plan
    if plan is None or step.failures:
        return Finding("peak", f"not planned: {'; '.join(step.failures)}", wrong=True)
    near = abs(measured / plan.predicted_peak_bytes - 1) <= NEAR
    text = f"{format_bytes(measured)} measured, {format_bytes(plan.predicted_peak_bytes)} predicted"
    return Finding(
        "peak", f"{text} of {format_bytes(plan.baseline_peak_bytes)} without rematerialization", wrong=not near
    )
