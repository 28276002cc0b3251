"""Recurrent layers: captured as the kernels that eager mode runs, with eager's bits, within the budget."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_remat import Rematerialized, rematerialize
from lightning_remat.capture import _torch as internals
from lightning_remat.capture._layouts import with_narrow_gaps
from lightning_remat.capture._ops import lstm_layer
from lightning_remat.measure import held_bytes, peak_memory
from tests.helpers.training import Classifier, assert_same, callback, fit

STEPS = 3
ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
ODD = 9
"""A width that fills no vector of a processor."""

Use = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def output(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)[0]


def loop(cell: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The user's own loop over time."""
    state, outputs = None, []
    for part in x.unbind(0):
        state = cell(part, state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs)


def with_a_teacher(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The same layer with gradients, and without: oneDNN has a kernel for each."""
    with torch.no_grad():
        target = layer(x.detach())[0]
    return layer(x)[0] * target


def given_states(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = x.mean().expand(1, x.shape[1], ODD)
    y, (_, c) = layer(x, (h, torch.zeros_like(h)))
    return y + c


def last_gates(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What is computed in place on a part of a wider tensor is read by what is not in place."""
    first, second = torch.unsafe_chunk(layer(x), 2, -1)
    return first.add_(1).exp() * second.add_(1).sigmoid_()


class Net(nn.Module):
    def __init__(self, layer: nn.Module, use: Use) -> None:
        super().__init__()
        self.first, self.layer, self.last, self.use = nn.Linear(5, 7), layer, nn.LazyLinear(3), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.dropout(self.use(self.layer, self.first(x)), 0.2)).square().mean()


def trained(
    module: nn.Module, step: Callable[..., torch.Tensor], *batch: Any, autocast: bool = False
) -> list[torch.Tensor]:
    """Losses, gradients and parameters of three optimizer steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    found = []
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = step(*batch)
        optimizer.zero_grad()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        optimizer.step()
    return [*found, *(p.detach().clone() for p in module.parameters())]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


CASES: dict[str, tuple[Callable[[], nn.Module], Use, dict[str, Any]]] = {
    "lstm": (lambda: nn.LSTM(7, ODD, 2, dropout=0.2, bidirectional=True), output, {}),
    "lstm batch first": (lambda: nn.LSTM(7, 32, 2, dropout=0.2, bias=False, batch_first=True), output, {}),
    "lstm twice": (lambda: nn.LSTM(7, ODD), with_a_teacher, {}),
    "lstm given states": (lambda: nn.LSTM(7, ODD), given_states, {}),
    "lstm frozen": (lambda: nn.LSTM(7, ODD).requires_grad_(False), output, {}),
    "lstm in evaluation": (lambda: nn.LSTM(7, ODD, 2, dropout=0.5).eval(), output, {}),
    "lstm of float64": (lambda: nn.LSTM(7, ODD, 2, dropout=0.2), output, {"dtype": torch.float64}),
    "lstm in autocast": (lambda: nn.LSTM(7, ODD, 2, dropout=0.2), output, {"autocast": True}),
    "gru": (lambda: nn.GRU(7, ODD, 2, dropout=0.2, bidirectional=True), output, {}),
    "gru in autocast": (lambda: nn.GRU(7, 100), output, {"autocast": True}),
    "rnn": (lambda: nn.RNN(7, ODD, 2, dropout=0.2, bidirectional=True, batch_first=True), output, {}),
    "rnn of relu": (lambda: nn.RNN(7, ODD, nonlinearity="relu"), output, {}),
    "lstm cell": (lambda: nn.LSTMCell(7, ODD), loop, {}),
    "gru cell": (lambda: nn.GRUCell(7, ODD), loop, {}),
    "wide gru cell": (lambda: nn.GRUCell(7, 100), loop, {}),
    "rnn cell": (lambda: nn.RNNCell(7, ODD), loop, {}),
    "gates": (lambda: nn.Linear(7, 2 * ODD), last_gates, {}),
}


SLOW = {"lstm in evaluation", "lstm of float64", "gru in autocast", "rnn of relu", "rnn", "rnn cell", "wide gru cell"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
@ONEDNN
def test_bits(name: str) -> None:
    make, use, options = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5)
    module = Net(make(), use)
    module(x)
    if dtype := options.get("dtype"):
        module, x = module.to(dtype), x.to(dtype)
    module.zero_grad()
    other, autocast = copy.deepcopy(module), options.get("autocast", False)
    step = rematerialize(other, budget="min", cost_model="unit", solver="greedy", time_limit=0.05)
    assert equal(trained(module, module, x, autocast=autocast), trained(other, step, x, autocast=autocast))
    assert len(step.plans) == 1 and step.runs == (STEPS,) and not step.failures
    fused = name.startswith("lstm") and "cell" not in name and "float64" not in name
    assert fused == any(op.target == "lstm_layer" for op in step.plan.graph.ops)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_bits_of_projections() -> None:
    torch.manual_seed(0)
    module, x = Net(nn.LSTM(7, ODD, 2, proj_size=5, dropout=0.2), output), torch.randn(2, 4, 5)
    module(x)
    other = copy.deepcopy(module)
    step = rematerialize(other, budget="min", cost_model="unit", solver="greedy", time_limit=0.05)
    assert equal(trained(module, module, x), trained(other, step, x))
    assert len(step.plans) == 1 and step.runs == (STEPS,) and not step.failures


@ONEDNN
def test_an_lstm_that_is_not_to_be_differentiated_has_other_bits() -> None:
    """What `test_bits` is about; with gradients disabled too, the call says which."""
    torch.manual_seed(0)
    x, h, c = torch.randn(3, 4, 7), torch.zeros(4, ODD), torch.zeros(4, ODD)
    weights = [torch.randn(4 * ODD, n) for n in (7, ODD)] + [torch.randn(4 * ODD) for _ in range(2)]
    args = (x, *weights, h, c, False, [], 2, ODD, 1, True, False, False)
    eager = torch.ops.aten.mkldnn_rnn_layer.default
    with_gradients = eager(*args, True)
    with torch.no_grad():
        without = eager(*args, True)
        got = lstm_layer(*args, True), lstm_layer(*args, False)
    assert equal(list(got[0][:3]), list(with_gradients[:3])) and got[0][3].nbytes == with_gradients[3].nbytes > 0
    assert equal(list(got[1][:3]), list(without[:3])) and got[1][3] is without[3] is None


# -- within the budget --------------------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    def __init__(self, bidirectional: bool = False) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Embedding(100, 32), nn.Dropout(0.1)
        self.lstm = nn.LSTM(32, 48, 2, dropout=0.2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(96 if bidirectional else 48, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(self.dropout(self.embed(tokens[:, :-1])))
        return functional.cross_entropy(self.head(self.dropout(y)).flatten(0, 1), tokens[:, 1:].flatten())


class SequenceClassifier(nn.Module):
    def __init__(self, bidirectional: bool = False) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 50, 2, dropout=0.2, bidirectional=bidirectional)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(100 if bidirectional else 50, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, hidden = self.gru(x)
        last = hidden[-2:].transpose(0, 1).flatten(1) if self.gru.bidirectional else hidden[-1]
        return functional.cross_entropy(self.head(last), x[0, :, :4].argmax(1))


NETWORKS: dict[str, tuple[Callable[[bool], nn.Module], Callable[[], torch.Tensor]]] = {
    "lstm": (LanguageModel, lambda: torch.randint(0, 100, (32, 33))),
    "gru": (SequenceClassifier, lambda: torch.randn(5, 64, 16)),
}


def slow(*cases: tuple[str, bool]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def check_budget(step: Rematerialized, module: nn.Module, batch: torch.Tensor) -> None:
    def once() -> None:
        loss = step(batch)
        module.zero_grad(set_to_none=True)
        loss.backward()

    plan = step.plan
    assert plan is not None and plan.rematerializes
    measured = held_bytes(module, batch, gradients=True) + peak_memory(once, "cpu")
    assert measured <= plan.budget_bytes
    assert plan.predicted_peak_bytes == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    ("name", "bidirectional"), [("lstm", True), *slow(("lstm", False), ("gru", False), ("gru", True))]
)
def test_within_the_budget(name: str, bidirectional: bool) -> None:
    make, data = NETWORKS[name]
    torch.manual_seed(0)
    module, batch = make(bidirectional), data()
    other = copy.deepcopy(module)
    step = rematerialize(other, budget=0.6, solver="greedy", time_limit=0.5)
    assert equal(trained(module, module, batch), trained(other, step, batch))
    assert len(step.plans) == 1 and step.runs == (STEPS,) and not step.failures
    check_budget(step, other, batch)


class Lit(Classifier):
    """One of the networks, as a Lightning module."""

    def __init__(self, name: str, bidirectional: bool) -> None:
        super().__init__()
        self.net = NETWORKS[name][0](bidirectional)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch)


@pytest.mark.parametrize(
    ("name", "bidirectional"), [("gru", False), *slow(("lstm", False), ("lstm", True), ("gru", True))]
)
def test_a_lightning_run_within_the_budget(name: str, bidirectional: bool) -> None:
    def make() -> Lit:
        return Lit(name, bidirectional)

    def data() -> DataLoader[Any]:
        return DataLoader([NETWORKS[name][1]() for _ in range(STEPS)], batch_size=None)  # type: ignore[arg-type]

    remat = callback(0.6, measure=True, solver="greedy", time_limit=0.5)
    plain, run = fit(make, train=data), fit(make, remat, train=data)
    assert_same(plain.results, run.results)
    assert len(remat.plans) == 1 and remat.runs == (STEPS,) and not remat.failures
    assert remat.plan is not None and remat.plan.rematerializes and remat.measured_peak_bytes is not None
    assert remat.measured_peak_bytes <= remat.plan.budget_bytes
    assert remat.plan.predicted_peak_bytes == pytest.approx(remat.measured_peak_bytes, rel=0.02)


# -- what is left alone -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_elsewhere_than_on_the_cpu_they_are_left_alone(kind: type[nn.Module]) -> None:
    module, x = kind(4, 6, device="meta"), torch.empty(3, 2, 4, device="meta")
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def step(x: torch.Tensor) -> torch.Tensor:
        return module(x * 2)[0].sum()

    before = internals.capture_failures()
    with internals.tracing():
        assert torch.compile(step, backend=backend)(x).shape == ()
    assert any("cuDNN's own" in reason for reason in internals.capture_failures() - before)
    assert len(graphs) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings(
    "ignore:RNN module weights are not part of single contiguous chunk"
)  # of the copy, in eager too
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_on_cuda_what_is_around_them_is_captured(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(0)
    module = Net(kind(7, ODD, 2, bidirectional=True), output).cuda()
    x = torch.randn(3, 4, 5, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        module(x)
        other = copy.deepcopy(module)
        step = rematerialize(other, budget="min", cost_model="unit", solver="greedy", time_limit=0.05)
        assert equal(trained(module, module, x), trained(other, step, x))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(step.plans) > 1 and not step.failures


# -- layouts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "stride", "narrow"),
    [
        ((4, 9), (9, 1), None),
        ((4, 9), (1, 4), None),
        ((4, 1), (1, 7), None),
        ((4, 9), (27, 1), (10, 1)),
        ((4, 9), (1, 12), (1, 5)),
        ((2, 4, 9), (108, 27, 1), (40, 10, 1)),
        ((2, 4, 9), (99, 9, 1), (37, 9, 1)),
        ((4, 9), (18, 2), (18, 2)),
    ],
)
def test_narrow_gaps(shape: tuple[int, ...], stride: tuple[int, ...], narrow: tuple[int, ...] | None) -> None:
    assert with_narrow_gaps(shape, stride) == narrow
