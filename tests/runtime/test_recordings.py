"""Recorded forwards and backwards: when they are replayed, what they share, and eager's bits in all cases."""

from __future__ import annotations

import copy
import itertools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat import RematConfig, Rematerialized, rematerialize
from lightning_remat.errors import ConfigError, RematWarning
from lightning_remat.exactness._advice import Settings
from lightning_remat.exactness._bits import same_bits
from lightning_remat.runtime import _copies, _recorded, _recordings
from lightning_remat.runtime._recordings import WARM_UP, Recorder
from tests.helpers import training
from tests.helpers.tapes import FakeTape, FakeTapes

UNRECORDED = WARM_UP + 1
"""Steps before the one that is recorded."""


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[FakeTapes]:
    made: list[FakeTapes] = []

    def make(device: torch.device) -> FakeTapes:
        made.append(FakeTapes(device))
        return made[-1]

    monkeypatch.setitem(_recordings.TAPES, "cpu", make)
    monkeypatch.setattr(FakeTapes, "fails", None)
    return made


class Net(nn.Module):
    """Linear layers, batch norm, dropout; the loss of rows of 16 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *itertools.chain.from_iterable(
                (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def pair(make: Callable[[], nn.Module] = Net, **options: object) -> tuple[nn.Module, nn.Module, Rematerialized]:
    """A module, the same again, and that one's step."""
    torch.manual_seed(0)
    eager = make()
    module = copy.deepcopy(eager)
    options = {"budget": "min", "time_limit": 0.5, "cost_model": "flops", "cuda_graphs": True, **options}
    return eager, module, rematerialize(module, **options)


def replays(tapes: list[FakeTapes]) -> list[int]:
    """How often each recorded run was replayed."""
    return [tape.replays for one in tapes for tape in one.tapes]


def batches(count: int, size: int = 8) -> list[torch.Tensor]:
    return [torch.randn(size, 16, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def assert_same(module: nn.Module, eager: nn.Module) -> None:
    for (name, one), other in zip(module.named_parameters(), eager.named_parameters(), strict=True):
        right = other[1]
        assert same_bits(one, right), name
        assert (one.grad is None) == (right.grad is None), name
        assert one.grad is None or right.grad is None or same_bits(one.grad, right.grad), name
    for (name, one), other in zip(module.named_buffers(), eager.named_buffers(), strict=True):
        assert same_bits(one, other[1]), name


def trained(
    module: nn.Module, call: Callable[..., torch.Tensor], data: list[torch.Tensor], none: bool = True, every: int = 1
) -> list[torch.Tensor]:
    """Losses of seeded training; an optimizer's step after each ``every`` of them."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for number, batch in enumerate(data):
        loss = call(batch) * (1 + number % 3)
        if number % every == 0:
            optimizer.zero_grad(set_to_none=none)
        loss.backward()
        if number % every == every - 1:
            optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("every", [1, 3])
def test_steps_are_replayed_with_the_bits_of_eager(tapes: list[FakeTapes], none: bool, every: int) -> None:
    eager, module, step = pair()
    data = batches(4 * UNRECORDED)
    assert all(map(same_bits, trained(module, step, data, none, every), trained(eager, eager, data, none, every)))
    assert_same(module, eager)
    assert step.plan is not None and step.plan.rematerializes and not step.failures
    assert min(replays(tapes)) >= UNRECORDED and len(replays(tapes)) >= 2


def test_gradients_are_added_inside_where_a_fit_allows_it(tapes: list[FakeTapes]) -> None:
    """Of several micro-batches, the first one's too: they have memory of their own."""
    options = {"accumulate_grad_batches": 3, "max_epochs": 8}
    remat = training.callback("min", cuda_graphs=True)
    plain = training.fit(training.Classifier, **options)
    scheduled = training.fit(training.Classifier, remat, **options)
    training.assert_same(plain.results, scheduled.results)
    assert not remat.failures
    found = replays(tapes)
    assert len(found) >= 2 and max(found) >= 4, found


def test_what_is_still_to_be_read_is_not_written_over(tapes: list[FakeTapes]) -> None:
    """Two forwards before their backwards, and two backwards of one forward."""
    eager, module, step = pair()
    data = batches(2 * UNRECORDED + 6)

    def losses(module: nn.Module, call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        found = []
        for one, other in zip(data[::2], data[1::2], strict=True):
            first, second = call(one), call(other)
            (first + 2 * second).backward()
            found += [first.detach(), second.detach()]
        for one in data:
            loss = call(one)
            loss.backward(retain_graph=True)
            second = call(one)
            loss.backward()
            second.backward()
        return found

    assert all(map(same_bits, losses(module, step), losses(eager, eager)))
    assert_same(module, eager)
    assert max(replays(tapes)) >= 1


def test_a_backward_that_keeps_what_was_saved_is_not_replayed(tapes: list[FakeTapes]) -> None:
    """A recorded one writes over it: the memory is used again as soon as it has been read."""
    _, module, step = pair()
    data = batches(2 * UNRECORDED)
    trained(module, step, data)
    forward, backward = replays(tapes)
    loss = step(data[0])
    loss.backward(retain_graph=True)
    assert replays(tapes) == [forward + 1, backward]
    loss.backward()
    assert replays(tapes) == [forward + 1, backward + 1]


def test_gradients_that_are_held_are_not_written_over(tapes: list[FakeTapes]) -> None:
    eager, module, step = pair()
    for one, call in ((eager, eager), (module, step)):
        torch.manual_seed(1)
        held = []
        for batch in batches(3 * UNRECORDED):
            one.zero_grad()
            call(batch).backward()
            held.append([parameter.grad for parameter in one.parameters()])
        if one is eager:
            right = held
    for gradients, others in zip(held, right, strict=True):
        assert all(map(same_bits, gradients, others))


def test_a_forward_without_its_backward(tapes: list[FakeTapes]) -> None:
    eager, module, step = pair()
    for one, call in ((eager, eager), (module, step)):
        torch.manual_seed(1)
        for number, batch in enumerate(batches(4 * UNRECORDED)):
            loss = call(batch)
            if number % 2:
                one.zero_grad()
                loss.backward()
            del loss
    assert_same(module, eager)
    assert sum(replays(tapes)) > 0


def test_other_shapes_are_recorded_too(tapes: list[FakeTapes]) -> None:
    eager, module, step = pair()
    data = [one for pair in zip(batches(3 * UNRECORDED), batches(3 * UNRECORDED, 12), strict=True) for one in pair]
    assert all(map(same_bits, trained(module, step, data), trained(eager, eager, data)))
    assert_same(module, eager)
    assert len(replays(tapes)) == 4 and min(replays(tapes)) >= 3


def test_parameters_that_move_are_followed(tapes: list[FakeTapes]) -> None:
    """Recorded again where they lie now."""
    eager, module, step = pair()
    for one, call in ((eager, eager), (module, step)):
        torch.manual_seed(1)
        for number, batch in enumerate(batches(6 * UNRECORDED)):
            if number == 3 * UNRECORDED:
                for parameter in one.parameters():
                    parameter.data = parameter.data.clone()
            one.zero_grad()
            call(batch).backward()
    assert_same(module, eager)
    assert len(replays(tapes)) == 4


@pytest.mark.parametrize("number", [0, 1], ids=["forward", "backward"])
def test_what_cannot_be_recorded_runs_as_before(tapes: list[FakeTapes], number: int) -> None:
    eager, module, step = pair()
    data = batches(2 * UNRECORDED)
    record = FakeTapes.record
    calls = itertools.count()

    def failing(self: FakeTapes, *args: object) -> tuple[object, FakeTape]:
        if next(calls) == number:
            FakeTapes.fails = RuntimeError("operation not permitted when stream is capturing\nmore")
        return record(self, *args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTapes, "record", failing)
        with pytest.warns(RematWarning, match="without CUDA graphs: RuntimeError: operation not permitted"):
            found = trained(module, step, data)
    assert all(map(same_bits, found, trained(eager, eager, data)))
    assert_same(module, eager)
    assert not step.failures and sum(replays(tapes)) == 0


def test_copies_lie_as_what_is_copied() -> None:
    """Kernels read vectors from the first aligned address on."""
    whole = torch.arange(60.0)
    for one in (whole, whole[1:], whole[3:].view(3, 19)[:, ::2], whole.view(6, 10).t(), whole[:0], whole[5]):
        made = _copies.memory_like(one).copy_(one)
        assert torch.equal(made, one)
        assert _copies.layout(made) == _copies.layout(one) is not None
    assert _copies.layout(whole[:1].expand(4)) is None


@pytest.mark.parametrize(
    "view", [lambda x: x[1:], lambda x: x.t(), lambda x: x[:1].expand(8, 16)], ids=["shifted", "turned", "expanded"]
)
def test_batches_that_lie_otherwise(tapes: list[FakeTapes], view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    eager, module, step = pair()
    data = [view(one) for one in batches(3 * UNRECORDED, 16)]
    assert all(map(same_bits, trained(module, step, data), trained(eager, eager, data)))
    assert_same(module, eager)
    assert bool(replays(tapes)) == (0 not in data[0].stride())


def test_what_lay_elsewhere_goes_back_there() -> None:
    """On CUDA, states of fused attention's dropout: in the host's memory unless its forward is recorded."""
    one, other = torch.zeros(2), torch.zeros(2, device="meta")
    before = _recorded.devices_of([one, other, 3])
    assert _recorded.moved_elsewhere(before, [one, other, 3]) == {}
    assert _recorded.moved_elsewhere(before, [one, one, 3]) == {1: torch.device("meta")}
    recorded = _recorded.Recorded(FakeTape(list, [], []), [], {}, frozenset(), [], [one, one], {1: other.device})
    found = _recorded.as_unrecorded(recorded, [5, one, one, one])
    assert [one.device.type for one in found[1:]] == ["cpu", "meta", "cpu"]


def test_what_is_stale_is_recorded_anew(tapes: list[FakeTapes]) -> None:
    """Another recording failed, and has spoilt the random number generator."""
    eager, module, step = pair()
    data = batches(3 * UNRECORDED)
    found = trained(module, step, data)
    for tape in tapes[0].tapes:
        tape.stale = True
    before = replays(tapes)
    assert all(
        map(
            same_bits, [*found, *trained(module, step, data)], trained(eager, eager, data) + trained(eager, eager, data)
        )
    )
    after = replays(tapes)
    assert after[: len(before)] == before and len(after) == 4 and min(after[2:]) >= 2


def test_an_observed_step_is_not_replayed(tapes: list[FakeTapes]) -> None:
    _, module, step = pair()
    trained(module, step, batches(2 * UNRECORDED))
    before, seen = replays(tapes), []
    with step.scheduled.observed(lambda name, _module, _args, _kwargs, run: (seen.append(name), run())[1]):
        trained(module, step, batches(1))
    assert seen and replays(tapes) == before


def test_closing_lets_go_of_what_is_recorded(tapes: list[FakeTapes]) -> None:
    _, module, step = pair()
    trained(module, step, batches(2 * UNRECORDED))
    recorder = step.scheduled._plans.graphs[0].exchange.recorder
    assert isinstance(recorder, Recorder) and recorder._recorded
    step.close()
    assert not recorder._recorded
    trained(module, step, batches(2))


def test_nothing_is_recorded_unless_asked_for(tapes: list[FakeTapes]) -> None:
    _, module, step = pair(cuda_graphs=False)
    trained(module, step, batches(2 * UNRECORDED))
    assert not tapes


def test_an_option_that_is_no_yes_or_no() -> None:
    with pytest.raises(ConfigError, match="cuda_graphs"):
        RematConfig(cuda_graphs="yes")  # type: ignore[arg-type]


class Tokens(nn.Module):
    """An embedding that is the head too, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(50, 16), nn.Linear(16, 48)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(self.embed(tokens)).chunk(3, -1)
        x = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), tokens.flatten())


def test_tokens_and_tied_weights(tapes: list[FakeTapes]) -> None:
    eager, module, step = pair(Tokens)
    data = [torch.randint(50, (3, 8), generator=torch.Generator().manual_seed(i)) for i in range(3 * UNRECORDED)]
    assert all(map(same_bits, trained(module, step, data), trained(eager, eager, data)))
    assert_same(module, eager)
    assert min(replays(tapes)) >= 3


def normalized(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Writes to all but its first argument."""
    count.add_(1)
    return functional.batch_norm(x, mean, var, training=True).tanh().square().mean()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("closure", [False, True])
def test_what_is_written_to_arguments_is_written_back(tapes: list[FakeTapes], closure: bool, fails: bool) -> None:
    layer = nn.Linear(16, 16)
    found = []
    for planned in (False, True):
        state = torch.zeros(16), torch.ones(16), torch.zeros((), dtype=torch.long)

        def function(x: torch.Tensor, *given: torch.Tensor, state: tuple[torch.Tensor, ...] = state) -> torch.Tensor:
            return normalized(layer(x), *(given or state))

        step: Any = function
        if planned:
            step = rematerialize(function, "min", time_limit=0.5, cost_model="flops", cuda_graphs=True)
            FakeTapes.fails = RuntimeError("no room") if fails else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RematWarning)
            for batch in batches(3 * UNRECORDED):
                step(batch, *(() if closure else state)).backward()
        found.append(state)
    assert all(map(same_bits, *found))
    assert (min(replays(tapes)) >= UNRECORDED) if not fails else not tapes[0].tapes


def test_a_buffer_that_moves_is_copied_and_the_step_replayed(tapes: list[FakeTapes]) -> None:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
            self.register_buffer("queue", torch.randn(16, 256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keys = nn.functional.normalize(self.queue, dim=0)
            return (self.layers(x).tanh() @ keys).log_softmax(1).square().mean()

    eager, module, step = pair(Queue)
    for number, batch in enumerate(batches(8 * UNRECORDED)):
        for one, call in ((eager, eager), (module, step)):
            loss = call(batch)
            with torch.no_grad():
                one.queue.copy_(torch.randn(16, 256, generator=torch.Generator().manual_seed(number)))
            one.zero_grad()
            loss.backward()
        assert_same(module, eager)
    assert min(replays(tapes)) >= 3 * UNRECORDED


def test_what_lies_elsewhere_in_each_step_is_copied(tapes: list[FakeTapes]) -> None:
    class Teaches(nn.Module):
        """A teacher whose parameters are assigned, and a queue that is."""

        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
            self.register_buffer("queue", torch.randn(32, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one, other in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                other.data = 0.9 * other.data + 0.1 * one.data
            self.queue = torch.cat([self.teacher(x).detach(), self.queue[: -len(x)]])
            return (self.student(x) @ self.queue.t()).log_softmax(1).square().mean()

    eager, module, step = pair(Teaches)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (eager, module)]
    kept = []  # so that no step finds the memory of the one before
    for batch in batches(12 * UNRECORDED):
        for call, optimizer in zip((eager, step), optimizers, strict=True):
            optimizer.zero_grad()
            call(batch).backward()
            optimizer.step()
        kept += [module.queue, *(p.data for p in module.teacher.parameters())]
        assert_same(module, eager)
    assert not step.failures
    assert replays(tapes) and min(replays(tapes)[-2:]) >= 3 * UNRECORDED


def test_messages_are_said_in_each_step(tapes: list[FakeTapes], capsys: pytest.CaptureFixture[str]) -> None:
    class Says(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("one step")
            return super().forward(x)

    _, _, step = pair(Says)
    data = batches(3 * UNRECORDED)
    with pytest.warns(RematWarning, match="does something beside its result"):
        step(data[0]).backward()
    for batch in data[1:]:
        step(batch).backward()
    assert capsys.readouterr().out.count("one step") == 3 * UNRECORDED
    assert not replays(tapes)


def test_random_numbers_of_another_device_are_drawn_in_each_step() -> None:
    """Here the graph is said to be of another device than its dropout."""
    _, _, step = pair()
    step(batches(1)[0])
    assert step.scheduled is not None
    captured: Any = step.scheduled._plans.graphs[0].captured
    assert _recorded.unrecordable(captured) is None
    other = types.SimpleNamespace(graph=captured.graph, nodes=captured.nodes, device=torch.device("cuda"))
    assert "draws random numbers on the device cpu" in str(_recorded.unrecordable(other))  # type: ignore[arg-type]


def test_tf32_in_its_new_form(tapes: list[FakeTapes]) -> None:
    """``torch.backends.cudnn.allow_tf32`` is not to be read then."""
    eager, module, step = pair()
    data = batches(3 * UNRECORDED)
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        assert all(map(same_bits, trained(module, step, data), trained(eager, eager, data)))
        assert isinstance(Settings.now(cuda=False).tf32, bool)
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert min(replays(tapes)) >= UNRECORDED


def test_a_tensor_that_lies_elsewhere_is_told_of(tapes: list[FakeTapes], monkeypatch: pytest.MonkeyPatch) -> None:
    here = _recordings.Recorder._is_here
    monkeypatch.setattr(_recordings.Recorder, "_is_here", lambda self, one: one.dim() > 0 and here(self, one))
    layer = nn.Linear(16, 16)
    step = rematerialize(
        lambda x, factor: (layer(x) * factor).tanh().square().mean(), 1.0, cost_model="flops", cuda_graphs=True
    )
    with pytest.warns(RematWarning, match="it is given a tensor"):
        step(batches(1)[0], torch.tensor(2.0)).backward()
    for batch in batches(2 * UNRECORDED):
        step(batch, torch.tensor(2.0)).backward()
    assert not replays(tapes)
