"""Inputs that only another op can give: what reads them is measured on what that op really returned."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_remat import rematerialize
from lightning_remat.capture import CapturedGraph, OpCall, Source, TensorSpec
from lightning_remat.capture import _torch as internals
from lightning_remat.cost import CostCache, OpCost, profile, roofline
from lightning_remat.cost._materialize import materialize
from lightning_remat.cost._workspace import Outputs
from lightning_remat.graph import TensorRole

aten = torch.ops.aten
CPU = torch.device("cpu")
MAGIC = 0x5EED
read_by_backward: list[list[int]] = []
"""States that the backward of `stateful` was run on."""


@torch.library.custom_op("remat_tests::stateful", mutates_args=())
def stateful(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twice the input, and a state of 24 bytes."""
    return 2 * x, torch.full((3,), MAGIC)


@stateful.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(5, dtype=torch.float32)  # a lie: 20 bytes of another type


@torch.library.custom_op("remat_tests::stateful_backward", mutates_args=())
def stateful_backward(grad: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The gradient; a kernel would take the state for an address."""
    read_by_backward.append(state.tolist())
    return 2 * grad


@stateful_backward.register_fake
def _(grad: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(grad)


stateful.register_autograd(
    lambda ctx, grad, _: stateful_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec.of(torch.empty(shape, dtype=dtype))


def call(target: Callable[..., Any], *args: Any, outputs: tuple[TensorSpec, ...], sources: Any = ()) -> OpCall:
    return OpCall(target, args, {}, outputs, sources)


def announced(target: Any, *args: Any) -> OpCall:
    """A call as it is captured: with the outputs that fake tensors say."""
    with internals.fake_tensors():
        made, _ = OpCall(target, args, {}, ()).with_tensors(
            lambda one: torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=one.device)
        )
        result = target(*made)
    results = result if isinstance(result, (tuple, list)) else (result,)
    return OpCall(target, args, {}, tuple(TensorSpec.of(one) for one in results))


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[str]]:
    """What the cost modules say, from a level on."""
    caplog.set_level(logging.DEBUG, "lightning_remat.cost")
    return lambda level: [record.getMessage() for record in caplog.records if record.levelno >= level]


def captured_graph(function: Callable[..., Any], *inputs: torch.Tensor) -> CapturedGraph:
    step = rematerialize(function, budget=1.0, cost_model="unit")
    step(*inputs).sum().backward()
    return step._step._plans.graphs[0].captured


def call_of(captured: CapturedGraph, target: str) -> OpCall:
    return next(one for one in captured.calls if one is not None and str(one.target) == target)


# -- profile ----------------------------------------------------------------------------------------------------------


def test_a_backward_is_measured_on_the_state_that_its_forward_left(
    logged: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LIGHTNING_REMAT_CACHE", str(tmp_path))
    read_by_backward.clear()

    def function(x: torch.Tensor) -> torch.Tensor:
        return stateful(x)[0].square()

    x = torch.randn(100, requires_grad=True)
    step = rematerialize(function, budget=1.0)
    step(x).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, 8 * x.detach())
    assert len(read_by_backward) > 1 and all(state == [MAGIC] * 3 for state in read_by_backward)
    assert logged(logging.WARNING) == []
    assert any("stateful" in said and "announced" in said for said in logged(logging.DEBUG))
    graph = step.plan.graph
    (op,) = [op for op in graph.ops if op.target == "remat_tests.stateful.default"]
    assert [graph.storages[graph.tensors[t].storage] for t in op.outputs] == [400, 24], "the real state counts"
    assert op.workspace_bytes == 0


def test_what_cannot_be_made_is_estimated_and_the_reader_never_run(logged: Callable[[int], list[str]]) -> None:
    ran: list[torch.Tensor] = []

    def broken(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise ArithmeticError("not today")

    def reader(state: torch.Tensor) -> torch.Tensor:
        ran.append(state)
        return state + 1

    x, state = spec(4), spec(2, dtype=torch.int64)
    producer = call(broken, x, outputs=(x, state))
    reading = call(reader, state, outputs=(state,), sources=(Source(producer, 1),))
    missing = call(reader, state, outputs=(state,), sources=(Source(call(torch.relu, x, outputs=(x,)), 1),))
    assert profile([reading, missing], CPU) == roofline([reading, missing], "cpu")
    assert ran == []
    (said,) = logged(logging.WARNING)  # once a target
    assert "reader" in said and "broken" in said and "not today" in said


def test_one_run_gives_all_that_is_read_of_an_op_and_nothing_else_is_held() -> None:
    runs: list[float] = []
    alive: list[weakref.ref[torch.Tensor]] = []

    def producer(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        runs.append(float(torch.rand(())))
        result = (x + 1, torch.full((2,), runs[-1]), torch.empty(1000), torch.full((2,), runs[-1]))
        alive.extend(weakref.ref(one) for one in (x, result[0], result[2]))
        return result

    def reader(one: torch.Tensor, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        assert torch.equal(one, other) and float(one[0]) == runs[-1]
        assert [ref() for ref in alive] == [None] * len(alive)
        return x + 1

    x, two = spec(4), spec(2)
    made = call(producer, x, outputs=(x, two, spec(1000), two))
    reading = call(reader, two, x, two, outputs=(x,), sources=(Source(made, 1), None, Source(made, 3)))
    (cost,) = profile([reading], CPU)
    assert cost.seconds > 0
    assert len(runs) == 4, "in each pass of the clock, and for the memory"


def test_long_chains_run_in_order_and_keep_what_is_alive_only() -> None:
    """Longer than Python's stack is deep."""
    peak, alive = [0], set[int]()

    def plus_one(x: torch.Tensor) -> torch.Tensor:
        result = x + 1
        number = int(result)
        alive.add(number)
        weakref.finalize(result, alive.discard, number)
        peak[0] = max(peak[0], len(alive))
        return result

    number = spec(dtype=torch.int64)
    last = call(plus_one, number, outputs=(number,))
    for _ in range(1500):
        last = call(plus_one, number, outputs=(number,), sources=(Source(last, 0),))
    ((x,), _) = materialize(last)
    assert int(x) == 1500
    assert peak[0] <= 3


def test_indices_whose_bounds_are_known_spread_without_their_source() -> None:
    def all_in_one_place(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("need not run")

    indices, table = spec(1000, dtype=torch.int64), spec(50, 8)
    source = Source(call(all_in_one_place, indices, outputs=(indices,)), 0)
    embedding = call(aten.embedding.default, table, indices, outputs=(spec(1000, 8),), sources=(None, source))
    assert materialize(embedding)[0][1].unique().numel() > 10


def test_keys_tell_sources_apart(tmp_path: Path) -> None:
    x, mask = spec(4), spec(4, dtype=torch.bool)

    def where(threshold: float, plain: bool = False) -> OpCall:
        sources = () if plain else (Source(call(aten.gt.Scalar, x, threshold, outputs=(mask,)), 0), None, None)
        return call(aten.where.self, mask, x, x, outputs=(x,), sources=sources)

    def own(x: torch.Tensor) -> torch.Tensor:
        return x > 0

    of_own = call(
        aten.where.self, mask, x, x, outputs=(x,), sources=(Source(call(own, x, outputs=(mask,)), 0), None, None)
    )
    assert where(0.5).key == where(0.5).key
    assert len({where(0.5).key, where(0.7).key, where(0.5, plain=True).key, of_own.key}) == 4
    cache = CostCache(tmp_path)
    cost = OpCost(1.0, 2, ((0, 3), (2, 0)))
    cache.store(CPU, [where(0.5), of_own], [cost, cost])
    assert cache.load(CPU) == {where(0.5).key: cost}, (
        "what an op outside of ATen made may be otherwise in the next process"
    )


# -- real against fake -------------------------------------------------------------------------------------------------


def table() -> dict[str, OpCall]:
    x, image, floats = spec(4, 8), spec(2, 3, 8, 8), spec(2, 4, 16, 8)
    weight, ids = spec(8), spec(6, dtype=torch.int64)
    return {
        "attention": announced(aten._scaled_dot_product_flash_attention_for_cpu.default, floats, floats, floats),
        "batch norm": announced(
            aten._native_batch_norm_legit_functional.default, image, *[spec(3)] * 4, True, 0.1, 1e-5
        ),
        "bags": announced(aten._embedding_bag.default, spec(10, 8), ids, spec(2, dtype=torch.int64)),
        "dropout": announced(aten.native_dropout.default, x, 0.5, True),
        "layer norm": announced(aten.native_layer_norm.default, x, [8], weight, weight, 1e-5),
        "loss": announced(aten.nll_loss_forward.default, spec(6, 8), ids, None, 1, -100),
        "pooling": announced(aten.max_pool2d_with_indices.default, image, [2, 2], [2, 2]),
        "sort": announced(aten.sort.default, x),
        "topk": announced(aten.topk.default, x, 3),
    }


def test_fake_results_of_usual_ops_lie_as_real_ones_and_take_their_memory(logged: Callable[[int], list[str]]) -> None:
    costs = dict(zip(table(), profile(list(table().values()), CPU), strict=True))
    assert {name: cost.real_bytes for name, cost in costs.items() if cost.real_bytes} == {}
    assert {name: cost.real_strides for name, cost in costs.items() if cost.real_strides} == {}
    assert logged(logging.DEBUG) == []


def lstm() -> tuple[OpCall, OpCall]:
    """One layer and its backward, time 5, batch 2, width 8 to 6."""
    x, h, out = spec(5, 2, 8), spec(2, 6), spec(5, 2, 6)
    weights = (spec(24, 8), spec(24, 6), spec(24), spec(24))
    forward = announced(aten.mkldnn_rnn_layer.default, x, *weights, h, h, False, [], 2, 6, 1, True, False, False, True)
    args = (x, *weights, h, h, out, h, h, out, h, h, False, 2, 6, 1, True, True, False, [], False, forward.outputs[3])
    taken = {7: 0, 8: 1, 9: 2, 13: 3}
    backward = announced(aten.mkldnn_rnn_layer_backward.default, *args)
    sources = tuple(Source(forward, taken[i]) if i in taken else None for i in range(14))
    return forward, OpCall(backward.target, backward.args, {}, backward.outputs, sources)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_the_reserve_of_an_lstm_is_a_real_one(logged: Callable[[int], list[str]]) -> None:
    """Its fake implementation says that it is empty; and where gradients are off there is none: nothing is made up then."""
    forward, backward = lstm()
    (args, _), (backward_args, _) = materialize(forward), materialize(backward)
    result = forward.target(*args)
    reserve = result[3].nbytes
    assert forward.outputs[3].nbytes == 0 < reserve == backward_args[-1].nbytes
    assert Outputs.of(forward, result, args, {}, CPU).real_bytes == ((3, reserve),)
    assert torch.equal(backward_args[7], result[0])
    assert all(torch.isfinite(one).all() for one in backward.target(*backward_args))
    assert profile([backward], CPU) == roofline([backward], "cpu")
    assert ["not returned" in said for said in logged(logging.WARNING)] == [True]


# -- capture -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Pooling, batch and layer norm, attention with a mask that is made on the way, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.batch_norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layer_norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.batch_norm(self.convolution(x)), 2)
        x = self.layer_norm(x.flatten(2).mT)
        places = torch.arange(x.shape[1], device=x.device)
        heads = x.view(x.shape[0], -1, 2, 4).transpose(1, 2)
        x = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = torch.where((places % 2 == 0)[:, None], x, x.exp())
        return functional.dropout(x, 0.25)


def test_captured_calls_know_what_makes_their_opaque_inputs() -> None:
    captured = captured_graph(Net(), torch.randn(2, 3, 8, 8))
    from_sources = {
        str(one.target): [source and (str(source.call.target), source.output) for source in one.sources]
        for one in captured.calls
        if one is not None and one.sources
    }
    pooling = from_sources["aten.max_pool2d_with_indices_backward.default"]
    assert pooling == [None, None, ("aten.max_pool2d_with_indices.default", 1)]
    attention = from_sources["aten._scaled_dot_product_flash_attention_for_cpu_backward.default"]
    forward = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert attention == [None, None, None, None, (forward, 0), (forward, 1)], "and its output, since it runs anyway"
    assert from_sources["aten.where.self"][0] == ("aten.unsqueeze.default", 0)
    assert not call_of(captured, "aten.convolution.default").sources
    assert not call_of(captured, "aten.exp.default").sources


def test_indices_of_a_maximum_and_masks_are_real_ones() -> None:
    captured = captured_graph(Net(), torch.randn(2, 3, 8, 8))
    (_, _, indices), _ = _tensors(captured, "aten.max_pool2d_with_indices_backward.default")
    rows, columns = indices // 8 // 2, indices % 8 // 2
    windows = torch.arange(4)
    assert (rows == windows[:, None]).all() and (columns == windows).all(), "each points into its own window"
    (condition, *_), _ = _tensors(captured, "aten.where.self")
    assert condition[:4, 0].tolist() == [True, False, True, False]
    noise = next(one for one in captured.calls if one is not None and "noise" in str(one.target))
    (mask, *_), _ = materialize(noise)
    assert 0.5 < mask.float().mean() < 0.95


def _tensors(captured: CapturedGraph, target: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    args, kwargs = materialize(call_of(captured, target))
    return [value for value in args if isinstance(value, torch.Tensor)], kwargs


def test_random_numbers_of_the_user_stay_when_masks_are_made() -> None:
    captured = captured_graph(Net(), torch.randn(2, 3, 8, 8))
    before = torch.get_rng_state()
    profile(captured.calls, CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_sizes_take_what_was_seen_at_those_that_were_measured() -> None:
    captured = captured_graph(Net(), torch.randn(2, 3, 8, 8))
    graph = captured.graph
    op = next(i for i, one in enumerate(graph.ops) if "max_pool2d_with_indices.default" in one.target)
    storage = graph.tensors[graph.ops[op].outputs[1]].storage
    none = [()] * len(graph.ops)
    real = [*none[:op], ((1, 7),), *none[op + 1 :]]
    costs = [0.0] * len(graph.ops), [0] * len(graph.ops)
    seen = captured.with_costs(*costs, real)
    assert seen.graph.storages == (*graph.storages[:storage], 7, *graph.storages[storage + 1 :])
    assert captured.taking(seen.real_bytes).graph.storages == seen.graph.storages
    given = graph.tensors[graph.inputs[0]]
    assert given.role is not TensorRole.INTERMEDIATE
    assert captured.taking({given.storage: 1}).graph == graph, "what is handed in is there as it is"


# -- CUDA --------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (nn.attention.SDPBackend.EFFICIENT_ATTENTION, "efficient"),
        (nn.attention.SDPBackend.FLASH_ATTENTION, "flash"),
        (nn.attention.SDPBackend.CUDNN_ATTENTION, "cudnn"),
    ],
)
def test_attention_on_cuda_is_measured_forward_and_backward(
    backend: nn.attention.SDPBackend, name: str, dropout: float, logged: Callable[[int], list[str]]
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(x.shape[0], -1, 4, 64).transpose(1, 2)
        with nn.attention.sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout, is_causal=True)

    x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    captured = captured_graph(function, x)
    target = f"aten._scaled_dot_product_{name}_attention"
    calls = [call_of(captured, f"{target}.default"), call_of(captured, f"{target}_backward.default")]
    costs = profile(calls, x.device)
    assert all(cost.seconds > 0 for cost in costs)
    assert logged(logging.WARNING) == []
    # The random state of the memory-efficient kernel lies on the CPU, where its fake implementation does not know it.
    assert costs[0].real_bytes == (((2, 0), (3, 0)) if name == "efficient" else ())
