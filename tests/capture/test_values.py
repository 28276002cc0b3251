"""Values that a step has written to, and what Python makes of numbers, are eager mode's, however early they are known."""

from __future__ import annotations

import collections
import functools
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_remat import rematerialize
from lightning_remat.capture.tracing._values import _may_abort
from lightning_remat.planner import RematWarning
from lightning_remat.runtime._backend import Backend


def written_by_data(x: Tensor) -> None:
    x.data.mul_(-1)


def written_to_an_item(x: Tensor) -> None:
    x.data[0] = -9


def written_by_foreach(x: Tensor) -> None:
    torch._foreach_mul_([x], -1)


def written_as_result(x: Tensor) -> None:
    torch.neg(x, out=x.data)


def written_to_a_part(x: Tensor) -> None:
    x.chunk(2)[0].data.neg_()


WRITES = [written_by_data, written_to_an_item, written_by_foreach, written_as_result, written_to_a_part]


def seen(batch: tuple[Any, ...]) -> list[str]:
    return [str(dict(one) if isinstance(one, dict) else one) for one in batch]


def same(call: Callable[..., Any], batches: Callable[[int], tuple[Any, ...]], count: int = 4) -> Any:
    """Call a step of one linear layer, and the same in eager mode; each returns a loss, and anything beside it."""
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    step = rematerialize(functools.partial(call, net), "min", time_limit=0.5, cost_model="unit")
    for number in range(count):
        found = []
        for one in (functools.partial(call, net), step):
            net.zero_grad()
            torch.manual_seed(number)
            batch = batches(number)
            torch.manual_seed(100 + number)
            loss, *beside = one(*batch)
            loss.backward()
            found.append(
                (loss.item(), *map(repr, beside), net.weight.grad.tolist(), torch.rand(()).item(), seen(batch))
            )
            del loss
        assert repr(found[0]) == repr(found[1])
    return step


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.filterwarnings("ignore:.*could not be captured")
def test_what_was_written_to_is_not_known(write: Callable[[Tensor], None]) -> None:
    def call(net: nn.Linear, x: Tensor) -> tuple[Tensor]:
        write(x)
        return (net(x).sum() * (2 if x.sum() > 0 else 1),)

    same(call, lambda _: (torch.randn(4, 8),))


@pytest.mark.filterwarnings("ignore:.*could not be captured")
def test_a_function_that_calls_itself_is_asked_of_its_own_batch() -> None:
    def call(net: nn.Linear, x: Tensor, depth: int = 0) -> tuple[Tensor]:
        found = net(x) * x.sum().item()
        torch._dynamo.graph_break()
        if depth < 2:
            found = found + call(net, x, depth + 1)[0] + call(net, -x, depth + 1)[0]
        return (found.sum(),)

    same(call, lambda _: (torch.randn(4, 8),))


@torch.library.custom_op("lightning_remat_tests::flip", mutates_args=())
def flip(x: Tensor) -> Tensor:
    return x.flip(0) if torch.rand(()) > 0.5 else x.clone()


@flip.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_of_ones_own_runs_once() -> None:
    def call(net: nn.Linear, x: Tensor) -> tuple[Tensor]:
        x = torch.ops.lightning_remat_tests.flip(x)
        return (net(x).sum() * x[0].mean().item(),)

    same(call, lambda _: (torch.randn(4, 8),))


def test_looking_into_a_batch_leaves_it_as_it_is() -> None:
    def call(net: nn.Linear, batch: dict[str, Tensor]) -> tuple[Tensor, list[str]]:
        found = net(batch["x"])
        if "mask" in batch:
            found = found + (2 if batch["mask"].any() else 1)
        return found.sum(), list(batch)

    def batch(number: int) -> tuple[dict[str, Tensor]]:
        made = collections.defaultdict(lambda: torch.zeros(2), x=torch.randn(4, 8))
        if number % 2 == 0:
            made["mask"] = torch.tensor([True, False])
        return (made,)

    same(call, batch)


INTEGERS = [
    lambda n: round(n, -1),
    lambda n: min(n, 2.5),
    lambda n: max(n, 2.5),
    lambda n: n * 0.0,
    lambda n: n == float(n),
]
FLOATS = [lambda v: v - v, lambda v: v * 0, lambda v: v // 0.7, lambda v: min(0, v), lambda v: v + 0, lambda v: {v: 1}]
SPECIAL = [1.5, -2.25, 0.0, math.inf, -0.0, math.nan, 1e300]


@pytest.mark.long
@pytest.mark.parametrize("of", INTEGERS)
def test_integers_are_pythons(of: Callable[[int], Any]) -> None:
    values = [23, -7, 2**53 + 1, 5]
    same(lambda net, x, one: (net(x).sum(), of(one.item())), lambda i: (torch.ones(4, 8), torch.tensor(values[i])))


@pytest.mark.long
@pytest.mark.parametrize("of", FLOATS)
@pytest.mark.filterwarnings("ignore:.*could not be captured")
def test_floats_are_pythons(of: Callable[[float], Any]) -> None:
    def batch(number: int) -> tuple[Tensor, Tensor]:
        return torch.ones(4, 8), torch.tensor(SPECIAL[number], dtype=torch.float64)

    same(lambda net, x, one: (net(x).sum(), of(float(one))), batch, len(SPECIAL))


def test_a_number_that_is_not_finite_reaches_the_loss() -> None:
    def call(net: nn.Linear, x: Tensor, one: Tensor) -> tuple[Tensor]:
        beside = one.item()
        return (net(x).sum() + (beside - beside),)

    same(call, lambda i: (torch.ones(4, 8), torch.tensor(math.inf if i % 3 == 2 else 1.0 + i)), 6)


def test_counts_of_another_number_than_rows() -> None:
    step = rematerialize(lambda x, counts: (x * 2).repeat_interleave(counts, 0).sum(), "min", cost_model="unit")
    x = torch.randn(4, 8, requires_grad=True)
    step(x, torch.tensor([1, 2, 0, 1])).backward()
    with pytest.raises(RuntimeError, match="repeats"):
        step(x, torch.tensor([1, 2, 1]))


def asked_twice(net: nn.Linear, x: Tensor) -> tuple[Tensor, Any]:
    total = x.sum().item() + x.sum().item()
    return net(x).sum() * total / max(x.sum().item(), 1.0), type(x.sum().item())


def of_statistics(net: nn.Linear, x: Tensor) -> tuple[Tensor]:
    mean, var = torch.zeros(8), torch.ones(8)
    hidden = nn.functional.batch_norm(net(x), mean, var, training=True)
    nn.functional.batch_norm(x, mean, var, training=True)
    return (hidden.square().sum() * mean.sum().item() * (2 if var.sum() > 8 else 1),)


def in_place_by_argument(net: nn.Linear, x: Tensor) -> tuple[Tensor]:
    nn.functional.relu(x.data, inplace=True)
    other = x - 0.5
    nn.functional.relu(other, True)
    torch.ops.aten.add_.Tensor(x.data, 1)
    return (net(x).sum() * x.sum().item() / other.sum().item(),)


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * 2 if function in (torch.Tensor.sum, torch.sum) else found


def an_index(net: nn.Linear, x: Tensor) -> tuple[Tensor, list[int]]:
    return net(x).sum(), list(range(4))[: (x > 0).sum()]


@pytest.mark.parametrize("call", [asked_twice, of_statistics, in_place_by_argument, an_index])
@pytest.mark.filterwarnings("ignore:.*could not be captured")
def test_values_are_those_of_the_moment(call: Callable[..., Any]) -> None:
    same(call, lambda _: (torch.randn(4, 8),))


def test_a_mode_of_the_users_holds_once() -> None:
    def call(net: nn.Linear, x: Tensor) -> tuple[Tensor]:
        return (net(x).mean() * x.sum().item() * (2 if x.sum() - x[0].sum() > 0 else 1),)

    with Doubling():
        same(call, lambda _: (torch.randn(4, 8),))


def test_numbers_are_returned_where_a_device_is_the_default() -> None:
    def call(net: nn.Linear, x: Tensor) -> tuple[Any, ...]:
        return net(x).sum(), float(x.abs().max()), 2 * x[0, 0].item(), torch.ones(3)

    with torch.device("cpu"):
        same(call, lambda _: (torch.randn(4, 8),))


def test_batches_of_two_types_are_captured_once_each() -> None:
    def call(net: nn.Linear, x: Tensor) -> tuple[Tensor]:
        number = (x * 0.1).sum().item() * (2 if x.sum() > 0 else 1)
        return (net(x.float())[x[:, 0] > 0].sum() * number,)

    types = torch.float64, torch.float16
    step = same(call, lambda number: (torch.randn(4, 8).abs().to(types[number % 2]),), 12)
    assert len(step._step._plans.graphs) == 2 and sum(step.runs) == 12


def test_powers_of_negative_numbers() -> None:
    def call(net: nn.Linear, x: Tensor) -> tuple[Tensor, Any]:
        mean = x.mean().item()
        return net(x).sum() * (1 + mean**2) + mean**3, mean**2

    step = same(call, lambda number: (torch.randn(4, 8) * (-1) ** number,), 6)
    assert sum(step.runs) == 6 and not step.failures


def test_what_the_step_does_not_come_to_warns_of_nothing() -> None:
    def call(net: nn.Linear, x: Tensor) -> tuple[Tensor]:
        spread = x.std(0).mean().item() if len(x) > 1 and x.sum() > 0 else 1.0
        return (net(x).sum() * spread,)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(call, lambda number: (torch.randn(4 if number < 4 else 1, 8).abs() * (-1) ** number,), 8)


def test_a_list_is_written_to_once() -> None:
    def call(net: nn.Linear, x: Tensor, weights: Any) -> tuple[Tensor]:
        weights += weights
        return (net(x).sum() * (weights.sum().item() if isinstance(weights, Tensor) else len(weights)),)

    same(call, lambda number: (torch.randn(4, 8), [1.0, 2.0, 3.0] if number % 2 else torch.ones(3)))


@pytest.mark.filterwarnings("ignore:.*could not be captured")
def test_an_array_is_written_to_once() -> None:
    def call(net: nn.Linear, x: Tensor, array: Any) -> tuple[Tensor]:
        array += 1
        array[0] = 3
        shared = x.numpy()
        shared *= 2
        return (net(x).sum() * float(array.sum()),)

    same(call, lambda _: (torch.randn(4, 8), np.zeros(3)))


@pytest.mark.parametrize("shape", [(3,), (4, 1), (2, 8)])
@pytest.mark.parametrize("writes", [False, True])
def test_masks_of_other_shapes_are_refused(shape: tuple[int, ...], writes: bool) -> None:
    def call(net: nn.Linear, x: Tensor, mask: Tensor) -> Tensor:
        hidden = net(x)
        if writes:
            hidden[mask] = hidden.mean()
        return hidden[mask].sum() + hidden[..., mask[: len(hidden), 0] if mask.dim() > 1 else mask].sum()

    step = rematerialize(functools.partial(call, nn.Linear(8, 8)), "min", time_limit=0.5, cost_model="unit")
    with pytest.raises(IndexError, match="does not match the shape of the indexed tensor"):
        step(torch.randn(4, 8), torch.ones(shape, dtype=torch.bool))


def test_on_another_device_what_picks_by_numbers_waits_for_its_turn() -> None:
    """An index that is out of range ends the process's use of a GPU; a mask does not."""
    graph = torch.fx.Graph()

    def given(tensor: Tensor) -> torch.fx.Node:
        node = graph.placeholder("given")
        node.meta["example_value"] = tensor
        return node

    for device, aborts in (("cpu", False), ("meta", True)):
        made = torch.empty(5, 2, device=device)
        x, mask, index = given(made), given(made > 0), given(made[:, 0].long())
        for key in (index, (slice(None), index), (mask, index)):
            assert _may_abort(graph.call_function(operator.getitem, (x, key))) == aborts
            assert _may_abort(graph.call_function(operator.setitem, (x, key, 0.0))) == aborts
        for key in (mask, 0, (slice(None), 1), (None, ..., mask)):
            assert not _may_abort(graph.call_function(operator.getitem, (x, key)))
            assert not _may_abort(graph.call_function(operator.setitem, (x, key, x)))
        assert _may_abort(graph.call_function(torch.gather, (x, 0, index))) == aborts


def test_a_graph_that_cannot_be_planned_is_soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are read before the step have new names in each trace, by which they cannot be made constants."""
    library = torch.library.Library("lightning_remat_tests", "DEF")
    library.define("added_(Tensor x, Tensor(a!) y) -> Tensor(a!)")
    library.impl("added_", lambda x, y: y.add_(x.sum()), "CPU")
    library.impl("added_", lambda x, y: y, "Meta")
    own, traces = Backend.__call__, []

    def call(backend: Backend, module: torch.fx.GraphModule, *args: Any) -> Any:
        traces.append(module)
        return own(backend, module, *args)

    monkeypatch.setattr(Backend, "__call__", call)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), 1, enable_nested_tensor=False)
    share = torch.tensor(0.7)

    def scaled(x: Tensor, share: Tensor) -> Tensor:
        found = net(x) * share.item()
        torch.ops.lightning_remat_tests.added_(x, torch.zeros(8))
        return found.square().mean()

    step = rematerialize(scaled, "min", time_limit=0.5, cost_model="unit")
    with pytest.warns(RematWarning):
        loss = step(torch.ones(2, 4, 8), share)
    assert torch.equal(loss, scaled(torch.ones(2, 4, 8), share))
    assert len(traces) < 8
    library._destroy()
