"""Every operator and module of torch's own databases of samples, in a step: its bits, its gradients' and the random numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree

from lightning_remat import rematerialize
from lightning_remat.exactness import same_bits

pytest.importorskip("expecttest")  # which torch's databases ask for

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

STEPS = 3
OPERATORS = {
    ".".join(filter(None, (op.name, op.variant_test_name))): op
    for op in op_db
    if op.supports_autograd and torch.float32 in op.dtypes and not op.name.startswith(("sparse.", "to_sparse"))
}
MODULES = {module.name: module for module in module_db if torch.float32 in module.dtypes}


LEFT_ALONE = {"index_fill", "index_put", "linalg.eig", "narrow"}
"""Operators of which a sample runs as before: its sizes depend on values, or it writes over complex numbers."""

OTHER_SUMS = {"ormqr"}
"""Known: torch computes their gradients on another way while it traces, which lie otherwise: sums over them differ."""


class _Parameter:
    """Stands for a tensor that is trained."""


class Sampled(nn.Module):
    """A loss of what is computed from a sample, whose tensors with gradients are parameters times a number."""

    def __init__(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        trained = [
            isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.layout is torch.strided for leaf in leaves
        ]
        self.compute = compute
        self.leaves = [
            _Parameter if one else leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
            for leaf, one in zip(leaves, trained, strict=True)
        ]
        self.given = nn.ParameterList(
            nn.Parameter(leaf.detach().clone()) for leaf, one in zip(leaves, trained, strict=True) if one
        )
        self.scale = nn.Parameter(torch.ones(()))
        self.mix = nn.Parameter(torch.linspace(-1, 1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = iter(self.given)
        leaves = [next(given) * self.scale if leaf is _Parameter else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        loss = x.sum() * self.mix.tanh().sum()
        for found in pytree.tree_leaves(self.compute(*args, **kwargs)):
            if isinstance(found, torch.Tensor) and found.requires_grad:
                real = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
                finite = torch.nan_to_num(real, 0.0, 0.0, 0.0)
                loss = loss + (finite.tanh() * torch.sigmoid(finite * self.mix.sum())).sum()
        return loss


def trained(module: nn.Module, call: Callable[..., Any]) -> Iterator[torch.Tensor]:
    """What the steps give: losses, gradients (an empty tensor for none), buffers and the state of the generator."""
    torch.manual_seed(7)
    for number in range(STEPS):
        module.zero_grad(set_to_none=True)
        loss = call(torch.full((2,), 1.0 + number))
        loss.backward()
        yield loss.detach()
        for parameter in module.parameters():
            yield torch.empty(0, 7) if parameter.grad is None else parameter.grad.clone()
        yield from (buffer.clone() for buffer in module.buffers())
        yield torch.get_rng_state()


def assert_equal_bits(module: nn.Module, *, planned: bool, sums_differ: bool) -> None:
    """With the smallest budget, within which each step has run (``planned``), or of which a reason is told.

    Where ``sums_differ``, the gradient of the factor of all that is given may differ in its last bits.
    """
    other = copy.deepcopy(module)
    lazy = any(isinstance(one, UninitializedParameter) for one in module.parameters())
    steps = STEPS - lazy  # the first finds the shapes
    expected = list(trained(module, module))
    call = rematerialize(other, "min", time_limit=1.0)
    found = list(trained(other, call))
    assert len(found) == len(expected)
    differ = [n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if not same_bits(a, b)]
    sums = range(1, len(found), len(found) // STEPS) if sums_differ else ()  # a step begins with its loss
    assert [n for n in differ if n not in sums] == []
    assert all(torch.allclose(found[n], expected[n], rtol=1e-5, atol=0) for n in differ)
    assert sum(call.runs) >= steps if planned else sum(call.runs) >= steps or call.failures


def assert_samples_have_equal_bits(
    modules: Iterable[Sampled], *, planned: bool = True, sums_differ: bool = False
) -> None:
    """The first and the last of them, if eager mode trains them."""
    every = list(modules)
    ran = 0
    for module in every[:: max(1, len(every) - 1)]:
        alone = copy.deepcopy(module)
        try:
            next(trained(alone, alone))
        except RuntimeError:
            continue
        assert_equal_bits(module, planned=planned, sums_differ=sums_differ)
        ran += 1
    if not ran:
        pytest.skip(f"eager mode trains none of {len(every)} samples")


@pytest.fixture(autouse=True)
def _warnings_are_no_errors() -> Iterator[None]:
    """What torch's samples are warned of, and what is not captured of them, says nothing of their bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_operators(name: str) -> None:
    op = OPERATORS[name]
    torch.manual_seed(0)
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=True)
    modules = (Sampled(op.op, (one.input, *one.args), one.kwargs) for one in samples)
    assert_samples_have_equal_bits(modules, planned=name not in LEFT_ALONE, sums_differ=name in OTHER_SUMS)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules(name: str, training: bool) -> None:
    info = MODULES[name]
    if not training and not info.train_and_eval_differ:
        pytest.skip("as in training")
    torch.manual_seed(0)

    def samples() -> Iterator[Sampled]:
        for one in info.module_inputs_func(info, "cpu", torch.float32, True, training):
            if one.forward_input is not None:
                made = info.module_cls(*one.constructor_input.args, **one.constructor_input.kwargs).train(training)
                yield Sampled(made, one.forward_input.args, one.forward_input.kwargs)

    assert_samples_have_equal_bits(samples())
