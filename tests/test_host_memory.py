"""Memory of the host for tensors of a device, and what streams wait for while they are copied there and back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch

from lightning_remat import _host_memory
from lightning_remat._host_memory import Transfer
from lightning_remat.errors import RematWarning
from lightning_remat.measure import peak_memory

CUDA = torch.device("cuda", 0)


def test_host_memory_lies_as_the_tensor_does() -> None:
    for tensor in (
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(3),
    ):
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
            value = tensor.to(dtype)
            waiting = _host_memory.begin_to_host(value).wait()
            assert _host_memory.on_host(waiting.untyped_storage()) and waiting.stride() == value.stride()
            back = _host_memory.begin_to_device(waiting, value.device).wait()
            assert torch.equal(back, value) and back.stride() == value.stride() and back.dtype == dtype
            assert not _host_memory.on_host(back.untyped_storage())
    empty = _host_memory.begin_to_host(torch.empty(0, 3)).wait()
    assert empty.shape == (0, 3)


def test_host_memory_does_not_count_as_the_devices() -> None:
    tensor = torch.randn(1024)
    kept = []
    used = peak_memory(lambda: kept.append(_host_memory.begin_to_host(tensor).wait()), "cpu")
    assert used < 64 and kept[0].nbytes == 4096
    assert (
        peak_memory(lambda: (kept.clear(), kept.append(torch.empty(512))), "cpu") >= 2048
    )  # and is no room when it goes


def test_memory_is_used_again_and_no_more_is_kept_than_was_used() -> None:
    pool = _host_memory._Pool(torch.device("cpu"))
    first, second = (torch.from_numpy(pool.take(nbytes)) for nbytes in (1000, 500))
    addresses = {first.data_ptr(), second.data_ptr()}
    view = first.view(torch.float32)[3:]
    del first
    assert pool.take(1000).ctypes.data not in addresses, "a view holds it"
    del view
    assert len(addresses & {pool.take(1000).ctypes.data for _ in range(2)}) == 1
    del second
    assert pool._most == 2500
    for nbytes in (700, 1800, 30, 2400, 100):
        held = torch.from_numpy(pool.take(nbytes))
        assert pool._used + pool._kept <= pool._most == 2500 and held.nbytes == nbytes
        assert pool._kept == sum(block.memory.nbytes for alike in pool._free.values() for block in alike)


# -- streams, of a device that is not there ---------------------------------------------------------------------------


class FakeEvent:
    def __init__(self, stream: str) -> None:
        self.stream = stream


class FakeStream:
    """Writes down what it is given."""

    device = CUDA

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for what {event.stream} was given")

    def record_event(self) -> FakeEvent:
        return FakeEvent(self.name)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    current = [FakeStream("compute", found)]

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    own = torch.Tensor.copy_

    def copied(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        found.append(f"{current[-1].name} copies{'' if non_blocking else ', blocking'}")
        return own(self, source)

    monkeypatch.setattr(_host_memory, "_pool", functools.cache(_host_memory._Pool))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(
        _host_memory, "_stream", lambda _device, to_device: FakeStream("in" if to_device else "out", found)
    )
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    return found


@pytest.mark.parametrize(("to_device", "name"), [(False, "out"), (True, "in")])
def test_a_copy_waits_for_what_was_computed_and_is_waited_for(log: list[str], to_device: bool, name: str) -> None:
    source, target = torch.randn(3), torch.empty(3)
    transfer = Transfer(source, target, CUDA, to_device=to_device)
    assert log == [f"{name} waits for compute", f"{name} copies"]
    assert transfer.wait() is target and torch.equal(source, target)
    del transfer
    assert log[2:] == [f"compute waits for what {name} was given"], "once"


def test_of_a_copy_that_nobody_waited_for_memory_is_not_used_before_it_has_ended(log: list[str]) -> None:
    transfer = Transfer(torch.randn(3), torch.empty(3), CUDA, to_device=True)
    del transfer
    assert log[2:] == ["compute waits for what in was given"]


def test_memory_that_is_used_again_is_not_written_to_before_it_was_read(log: list[str]) -> None:
    """Also where the step is called long before the device gets to it."""
    device = torch.randn(771)
    for number in range(2):
        host = _host_memory.host_memory(device.shape, device.stride(), device.dtype, torch.device("cpu"))
        address = host.data_ptr() if number == 0 else address  # noqa: F821 - of the first round
        assert host.data_ptr() == address
        Transfer(device, host, CUDA, to_device=False).wait()
        Transfer(host, torch.empty(771), CUDA, to_device=True).wait()
        del host
    first, second = log[: len(log) // 2], log[len(log) // 2 :]
    assert "out waits for what in was given" not in first
    assert second.index("out waits for what in was given") < second.index("out copies")


def test_where_nothing_can_be_pinned_it_is_usual_memory_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_nbytes: int) -> torch.Tensor:
        raise RuntimeError("no pinned memory here")

    monkeypatch.setattr(_host_memory, "pinned", refused)
    _host_memory._warn_of_unpinned.cache_clear()
    monkeypatch.setattr(_host_memory, "_pool", functools.cache(_host_memory._Pool))
    with pytest.warns(RematWarning, match=r"could be pinned \(no pinned memory here\)") as told:
        made = [_host_memory.host_memory(torch.Size((2, 3)), (1, 2), torch.float16, CUDA) for _ in range(2)]
    assert len(told) == 1 and all(one.stride() == (1, 2) and one.device.type == "cpu" for one in made)
