"""Steps that return more than their loss: what nobody takes a gradient of must not change the last bits of the others."""

from __future__ import annotations

import copy
import operator
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus

from lightning_remat import rematerialize
from lightning_remat.lowering import without_tangents

Outputs = tuple[torch.Tensor, ...]


class Contrastive(nn.Module):
    """As CLIP's: logits both ways, and a scale whose gradient is a sum over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Outputs:
        logits = torch.matmul(self.one(x), self.other(y).t()) * self.scale.exp()
        which = torch.arange(len(x))
        return (cross_entropy(logits, which) + cross_entropy(logits.t(), which)) / 2, logits.t(), logits


class Reshaped(nn.Module):
    """The gradient comes transposed, and eager mode copies it to reshape it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Outputs:
        h = (self.first(x) * self.scale).view(len(x) * 4, 4)
        g = (h * self.scale).view(len(x), 4, 4)
        return self.second(softplus(g.transpose(0, 2))).square().mean() + y.mean(), h, g


class Joined(nn.Module):
    """An op other than a sum takes the gradients of several outputs: zeros for those that have none, in eager mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Dropout(0.3))
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Outputs:
        a, b, c = (self.net(x) * self.scale).split(8, dim=1)
        return (a.t() @ c).logsumexp(0).sum() + y.mean(), b, a * 2


NETS = [Contrastive, Reshaped, Joined]
TAKEN: dict[str, Callable[..., torch.Tensor]] = {
    "the loss": lambda loss, *_: loss,
    "another": lambda _loss, one, *_: one.sin().sum(),
    "both": lambda loss, one, *_: loss + one.sin().sum(),
    "all": lambda *outputs: sum(one.cos().sum() for one in outputs),
}


@pytest.mark.parametrize("budget", [1.0, "min"])
@pytest.mark.parametrize("net", NETS)
def test_gradients_are_those_of_eager_mode(net: type[nn.Module], budget: float | str) -> None:
    torch.manual_seed(0)
    eager = net()
    other = copy.deepcopy(eager)
    step: Any = rematerialize(other, budget=budget, cost_model="unit", solver="greedy", time_limit=0.05)
    for seed in range(20):
        taken = TAKEN["the loss"] if seed < 8 else list(TAKEN.values())[seed % len(TAKEN)]
        gradients = []
        for module, run in ((eager, eager), (other, step)):
            torch.manual_seed(seed)
            x, y = torch.randn(8, 16), torch.randn(8, 16)
            module.zero_grad()
            taken(*run(x, y)).backward()
            gradients.append({name: p.grad for name, p in module.named_parameters()})
        for name, gradient in gradients[0].items():
            found = gradients[1][name]
            assert (gradient is None) == (found is None), (seed, name)
            assert gradient is None or torch.equal(gradient, found), (seed, name)
    assert sum(step.scheduled.runs) == 20 and not step.scheduled.failures
    # How gradients lie is guessed, and planned for once it is seen: by torch 2.11 that they lie in one piece, in order, which
    # transposed ones do not; by later releases that they lie as the outputs do, among others' rows say, which they do not.
    guessed_wrong = Contrastive if torch.__version__.startswith("2.11.") else Joined
    assert len(step.scheduled.plans) == (2 if net is guessed_wrong else 1)


def test_a_layout_that_is_not_known_leaves_the_backward_as_it_is() -> None:
    def backward(then: Callable[..., Any]) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        one, other = graph.placeholder("tangents_1"), graph.placeholder("tangents_2")
        total = graph.call_function(torch.ops.aten.add.Tensor, (other, one))
        result = graph.call_function(then, (total,))
        one.meta["val"] = torch.empty(3, 3).t()
        other.meta["val"] = total.meta["val"] = result.meta["val"] = torch.empty(3, 3)
        graph.output((result,))
        return torch.fx.GraphModule({}, graph)

    unknown = backward(torch.clone)
    assert without_tangents(unknown, {"tangents_2"}) is unknown
    next(node for node in unknown.graph.nodes if node.target is torch.clone).meta["remat_handed_over"] = True
    assert without_tangents(unknown, {"tangents_2"}) is not unknown
    found = without_tangents(backward(torch.ops.aten.neg.default), {"tangents_2"})
    called = [node.target for node in found.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.aten.clone.default, torch.ops.aten.neg.default]
    given = torch.randn(3, 3).t()
    (result,) = found(given, torch.zeros(3, 3))
    assert torch.equal(result, -given) and result.stride() == (1, 3)


aten = torch.ops.aten
Then = Callable[[torch.fx.Graph, torch.fx.Node], torch.fx.Node]


def called(graph: torch.fx.Graph, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> torch.fx.Node:
    """A call in a graph; its results are contiguous, of shape (3, 3), unless told otherwise."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = torch.empty(3, 3) if value is None else value
    return node


def summed(then: Then) -> torch.fx.GraphModule:
    """A backward that adds up two tangents, of which the first is transposed, and goes on with the sum."""
    graph = torch.fx.Graph()
    one, other = graph.placeholder("tangents_1"), graph.placeholder("tangents_2")
    one.meta["val"], other.meta["val"] = torch.empty(3, 3).t(), torch.empty(3, 3)
    graph.output((then(graph, called(graph, aten.add.Tensor, other, one)),))
    return torch.fx.GraphModule({}, graph)


def one_of_several(graph: torch.fx.Graph, total: torch.fx.Node) -> torch.fx.Node:
    values = (torch.empty(3, 3), torch.empty(3, 1), torch.empty(3, 1))
    norm = called(graph, aten.native_layer_norm.default, total, [3], None, None, 1e-5, value=values)
    return called(graph, operator.getitem, norm, 0)


def in_place(graph: torch.fx.Graph, total: torch.fx.Node) -> torch.fx.Node:
    return called(graph, aten.neg_.default, total)


def over_it(graph: torch.fx.Graph, total: torch.fx.Node) -> torch.fx.Node:
    """Written over the sum, whose layout it has then as well."""
    return called(graph, aten.neg.out, total, out=total)


def over_another(graph: torch.fx.Graph, total: torch.fx.Node) -> torch.fx.Node:
    """Written over what has another layout now: it gets memory of its own."""
    return called(graph, aten.neg.out, total, out=called(graph, aten.zeros.default, [3, 3]))


def reshaped(graph: torch.fx.Graph, total: torch.fx.Node) -> torch.fx.Node:
    return called(graph, aten.view.default, total, [9], value=torch.empty(9))


def in_place_with_another(graph: torch.fx.Graph, total: torch.fx.Node) -> torch.fx.Node:
    return called(graph, aten.add_.Tensor, total, called(graph, aten.ones.default, [3, 3]))


def written_by_two(graph: torch.fx.Graph, total: torch.fx.Node) -> torch.fx.Node:
    """An op whose memory does not fit any more, and of which nothing is known."""
    return called(graph, aten.mul_.Tensor, called(graph, aten.zeros.default, [3, 3]), total)


@pytest.mark.parametrize("then", [one_of_several, in_place, over_it, over_another, reshaped])
def test_what_follows_is_computed_from_the_one_gradient(then: Then) -> None:
    module = summed(then)
    found = without_tangents(module, {"tangents_2"})
    assert found is not module
    given = torch.randn(3, 3).t()
    (right,) = module(given, torch.zeros(3, 3))
    (got,) = found(given, None)
    assert torch.equal(got, right)
    (output,) = found.graph.output_node().args[0]  # type: ignore[misc]
    assert output.meta["val"].stride() == got.stride(), "what is told of its layout is so"


@pytest.mark.parametrize("then", [in_place_with_another, written_by_two])
def test_what_cannot_be_told_stays(then: Then) -> None:
    module = summed(then)
    assert without_tangents(module, {"tangents_2"}) is module


def test_symbolic_sizes_stay() -> None:
    module = summed(in_place)
    size = module.graph.placeholder("size")
    size.meta["val"] = torch.SymInt(unittest.mock.Mock())
    assert without_tangents(module, {"tangents_2"}) is module
