"""Lowered code makes a view once, and of what it is a view of: its results lie as before, and memory is given up as early."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_remat import rematerialize
from lightning_remat.capture._torch._running import boxed
from lightning_remat.capture._torch._views import fewer_views
from lightning_remat.measure import peak_memory

aten = torch.ops.aten


def changed(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    """A view of ``x``, of 24 elements, or something that is computed from it."""
    kind = rng.randrange(9)
    if kind == 0:
        return (
            aten.view.default(x, rng.choice([[24], [4, 6], [2, 3, 4], [1, 24]]))
            if x.is_contiguous()
            else aten.neg.default(x)
        )
    if kind == 1:
        return aten.t.default(x) if x.dim() <= 2 else aten.transpose.int(x, 0, 1)
    if kind == 2:
        return aten.transpose.int(x, 0, -1)
    if kind == 3:
        return aten.expand.default(x, list(x.shape))
    if kind == 4:
        return aten._unsafe_view.default(aten.clone.default(x, memory_format=torch.contiguous_format), [6, 4])
    if kind == 5:
        return aten.alias.default(x)
    if kind == 6:
        return aten.unsqueeze.default(x, 0) if x.dim() < 3 else aten.permute.default(x, [2, 0, 1])
    if kind == 7:
        return aten.mul_.Tensor(x, 2.0)
    return aten.sin.default(x)


@pytest.mark.parametrize("seed", range(40))
def test_random_views(seed):
    def function(*inputs: torch.Tensor) -> Any:
        rng, values = random.Random(seed), [aten.clone.default(one) for one in inputs]
        for _ in range(25):
            values.append(changed(rng, rng.choice(values)))
        return tuple(rng.sample(values, 5))

    inputs = torch.arange(24.0), torch.arange(24.0).reshape(4, 6)
    module = make_fx(function, tracing_mode="fake")(*inputs)
    expected = torch.fx.Interpreter(module).run(*inputs)
    got = boxed(module)(list(inputs))
    assert len(fewer_views(module.graph)) <= len(module.graph.nodes)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
    alike = [
        [a.untyped_storage()._cdata == b.untyped_storage()._cdata for a in some for b in some]
        for some in (expected, got)
    ]
    assert alike[0] == alike[1]
    assert len({id(one) for one in got}) == len({id(one) for one in expected})


def test_a_view_that_only_a_trace_takes_for_none():
    """Kernels give a dimension of one another stride than traces do, and BLAS another algorithm for it."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        turned = aten.permute.default(aten.unsqueeze.default(x, 2), [0, 2, 1])
        return aten.bmm.default(aten.view.default(turned, [16, 1, 64]), y)

    inputs = torch.randn(16, 64), torch.randn(16, 64, 256)
    module = make_fx(function, tracing_mode="fake")(*inputs)
    assert aten.view.default in [line.target for line in fewer_views(module.graph)]
    assert torch.equal(boxed(module)(list(inputs)), torch.fx.Interpreter(module).run(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bn,bnd->bd", [(16, 64), (16, 64, 256)]),  # attention pooling
        ("hn,hnl->hl", [(16, 8), (16, 8, 512)]),  # a state space's kernel
        ("bdn,bn->bd", [(4, 256, 64), (4, 64)]),
    ],
)
def test_products_of_batches_of_matrices_and_vectors(equation, shapes, dtype):
    def loss(*factors: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, *factors).abs().square().mean()

    torch.manual_seed(0)
    data, found = [torch.randn(shape, dtype=dtype) for shape in shapes], []
    for call in (loss, rematerialize(loss, budget="min", cost_model="unit", solver="greedy")):
        factors = [one.clone().requires_grad_() for one in data]
        value = call(*factors)
        value.backward()
        found.append([value.detach(), *(one.grad for one in factors)])
    assert all(map(torch.equal, *found))


def step(x: torch.Tensor, w: torch.Tensor) -> Any:
    """As in a linear layer's forward and backward: many views, of which seven need not be."""
    h = aten.view.default(aten.mm.default(aten.view.default(x, [512, 64]), aten.t.default(w)), [8, 64, 64])
    g = aten.mul.Tensor(aten.view.default(aten.view.default(h, [512, 64]), [8, 64, 64]), h)
    first = aten.mm.default(aten.t.default(aten.view.default(g, [512, 64])), aten.view.default(x, [512, 64]))
    last = aten.mm.default(aten.view.default(g, [512, 64]), aten.t.default(aten.t.default(w)))
    return first, aten.view.default(aten.view.default(last, [8, 64, 64]), [8, 4, 16, 64])


def test_memory_is_given_up_as_early():
    inputs = torch.randn(8, 64, 64), torch.randn(64, 64)
    module = make_fx(step, tracing_mode="fake")(*inputs)
    peaks, results = [], []
    for run in (torch.fx.Interpreter(module).boxed_run, boxed(module)):
        peaks.append(peak_memory(lambda: results.append(run(list(inputs)))))  # noqa: B023
    assert peaks[0] == peaks[1]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    views = [
        sum("view" in str(node.target) or ".t." in str(node.target) for node in nodes)
        for nodes in (module.graph.nodes, fewer_views(module.graph))
    ]
    assert views == [13, 6]


def test_sizes_that_are_symbols_are_left_alone():
    def function(x: torch.Tensor) -> torch.Tensor:
        return aten.sin.default(aten.view.default(aten.view.default(x, [x.shape[0] * 4]), [x.shape[0], 4]))

    module = make_fx(function, tracing_mode="symbolic")(torch.ones(3, 4))
    for rows in (3, 5):
        assert torch.equal(boxed(module)([torch.ones(rows, 4)]), torch.ones(rows, 4).sin())
