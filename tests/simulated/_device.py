"""Puts the simulated device in the place of torch's functions for CUDA, which torch's CPU build has no code for.

The device itself is compiled (``device.cpp``), and has to be loaded before torch is.
"""

# ruff: noqa: E402
from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from tests.simulated import _build

_FOUND = _build.built("device.cpp")
for _name in _build.LIBRARIES:
    ctypes.CDLL(str(_build.torch_folder() / "lib" / f"lib{_name}.so"), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(str(_FOUND), mode=ctypes.RTLD_GLOBAL)

import torch

TOTAL_BYTES = 2**34
NAME = "Simulated"


def _compiled() -> Any:
    spec = importlib.util.spec_from_file_location("simulated_device", _FOUND)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_device = _compiled()


class Stream(torch.Stream):
    """A stream in which everything has ended."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Any:
        del device, priority
        return super().__new__(cls, **(known or {"device": "cuda:0"}))

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass


class Event:
    def __init__(self, *_args: Any, **_options: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return (other._at - self._at) * 1e3


_pools = itertools.count(1)


class Graph:
    """``torch.cuda.CUDAGraph``: what is recorded is run again, op by op, at the same addresses."""

    def __init__(self, keep_graph: bool = False) -> None:
        del keep_graph
        self._recorded = _device.Graph()

    def capture_begin(self, pool: tuple[int, int] | None = None, **_options: Any) -> None:
        self._recorded.begin(pool[1] if pool else next(_pools))

    def capture_end(self) -> None:
        self._recorded.end()

    def register_generator_state(self, generator: torch.Generator) -> None:
        self._recorded.register(generator)

    def replay(self) -> None:
        self._recorded.replay()

    def reset(self) -> None:
        self._recorded.reset()


class Device(contextlib.AbstractContextManager[None]):
    """``torch.cuda.device``: there is one only."""

    idx, prev_idx = 0, -1

    def __init__(self, device: Any) -> None:
        pass

    def __exit__(self, *_raised: object) -> None:
        pass


def _statistics(found: dict[str, int]) -> dict[str, int]:
    """As ``torch.cuda.memory_stats`` gives them."""
    bytes_of = {
        **dict.fromkeys(("allocated_bytes", "active_bytes"), ("allocated", "most allocated")),
        "reserved_bytes": ("reserved", "most reserved"),
        "requested_bytes": ("requested", "most requested"),
    }
    made = {"num_alloc_retries": 0, "num_ooms": 0, "num_device_alloc": 0, "num_device_free": 0}
    for pool in ("all", "large_pool", "small_pool"):
        for name, (now, most) in bytes_of.items():
            made |= {f"{name}.{pool}.current": found[now], f"{name}.{pool}.peak": found[most]}
        for name in ("allocation", "segment", "active"):
            made |= {f"{name}.{pool}.current": found["blocks"], f"{name}.{pool}.allocated": found["allocations"]}
        made |= {
            f"{one}.{pool}.{kind}": 0
            for one in ("inactive_split", "inactive_split_bytes")
            for kind in ("current", "peak")
        }
    return made


def _segment(address: int, nbytes: int, capacity: int, pool: int, live: bool) -> dict[str, Any]:
    """As ``torch.cuda.memory_snapshot`` gives them: one for each block."""
    state = "active_allocated" if live else "inactive"
    block = {"address": address, "size": capacity, "requested_size": nbytes, "state": state}
    whole = {"device": 0, "address": address, "total_size": capacity, "allocated_size": capacity * live}
    pools = {"segment_type": "large", "segment_pool_id": (0, pool), "is_expandable": False}
    return {**whole, **pools, "stream": 0, "blocks": [block]}


def _memory(device: Any) -> dict[str, Callable[..., Any]]:
    share = [1.0]

    def numbers() -> dict[str, int]:
        found: dict[str, int] = device.statistics()
        return found

    def set_share(fraction: float, _device: Any = None) -> None:
        share[0] = fraction
        device.set_limit(int(fraction * TOTAL_BYTES))

    return {
        "memory_allocated": lambda _=None: numbers()["allocated"],
        "max_memory_allocated": lambda _=None: numbers()["most allocated"],
        "memory_reserved": lambda _=None: numbers()["reserved"],
        "max_memory_reserved": lambda _=None: numbers()["most reserved"],
        "reset_peak_memory_stats": lambda _=None: device.reset_peak(),
        "memory_stats": lambda _=None: _statistics(numbers()),
        "memory_snapshot": lambda mempool_id=None: [] if mempool_id else [_segment(*one) for one in device.blocks()],
        "mem_get_info": lambda _=None: (TOTAL_BYTES - numbers()["reserved"], TOTAL_BYTES),
        "empty_cache": lambda: None,
        "get_allocator_backend": lambda: "native",
        "set_per_process_memory_fraction": set_share,
        "get_per_process_memory_fraction": lambda _=None: share[0],
    }


def _random(generator: torch.Generator) -> dict[str, Any]:
    return {
        "default_generators": (generator,),
        "get_rng_state": lambda _=None: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda state, _=None: generator.set_state(state),
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
    }


def _current_stream(_device: Any = None) -> Stream:
    found = torch._C._accelerator_getStream(0)
    return Stream(stream_id=found.stream_id, device_index=0, device_type=found.device_type)


@contextlib.contextmanager
def _in_stream(stream: Stream | None) -> Iterator[None]:
    before = _current_stream()
    torch._C._accelerator_setStream(stream if stream is not None else before)
    try:
        yield
    finally:
        torch._C._accelerator_setStream(before)


def _copied(storage: Any, device: torch.device) -> Any:
    """A copy of a storage; torch's own way to make one is compiled without CUDA."""
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    made.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    return made.untyped_storage()


def install() -> None:
    """From now on this process has one CUDA device."""
    device = _device
    device.start()
    properties = types.SimpleNamespace(
        name=NAME,
        total_memory=TOTAL_BYTES,
        major=9,
        minor=0,
        multi_processor_count=132,
        L2_cache_size=50 * 2**20,
        uuid=NAME,
    )
    there = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "_initialized": True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "synchronize": lambda _=None: device.wait("the device is waited for"),
        "get_device_properties": lambda _=None: properties,
        "get_device_name": lambda _=None: NAME,
        "get_device_capability": lambda _=None: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": device.is_recording,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, next(_pools)),
        "device": Device,
        "Stream": Stream,
        "Event": Event,
        "current_stream": _current_stream,
        "default_stream": lambda _=None: Stream(stream_id=0, device_index=0, device_type=1),
        "set_stream": torch._C._accelerator_setStream,
        "stream": _in_stream,
        **_memory(device),
        **_random(device.default_generator()),
    }
    for name, one in there.items():
        setattr(torch.cuda, name, one)
    torch.cuda.random.manual_seed_all = there["manual_seed_all"]  # type: ignore[attr-defined]
    of_torch = {
        "_cuda_getCurrentRawStream": lambda _: 0,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda _: None,
        "_cuda_exchangeDevice": lambda _: 0,
        "_cuda_maybeExchangeDevice": lambda _: 0,
        "_cuda_clearCublasWorkspaces": device.clear_workspaces,
        "_cuda_isCurrentStreamCapturing": device.is_recording,
        "_host_emptyCache": lambda: None,
        "_cuda_getMemoryFraction": there["get_per_process_memory_fraction"],
    }
    for name, one in of_torch.items():
        setattr(torch._C, name, one)
    for name, to_host in (("clone", False), ("cpu", True)):
        own = getattr(torch.UntypedStorage, name)

        def copied(storage: Any, own: Any = own, to_host: bool = to_host) -> Any:
            if storage.device.type == "cpu":
                return own(storage)
            return _copied(storage, torch.device("cpu") if to_host else storage.device)

        setattr(torch.UntypedStorage, name, copied)
