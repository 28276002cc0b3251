"""Ops that come again in a trace are copied: the graph is the one that is traced otherwise, node for node."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import aot_autograd
from torch._subclasses.functional_tensor import FunctionalTensor

from benchmarks.networks import build
from lightning_remat import rematerialize
from lightning_remat.capture._torch import _aot
from lightning_remat.capture._torch.alike._ops import Forms, OverwrittenError, alike_ops
from lightning_remat.runtime import _backend
from tests.helpers.cases import diagonal
from tests.helpers.nets import check, inputs, net

LAYERS: dict[str, dict[str, Any]] = {
    **{network: {"layers": 2} for network in ("gpt2", "gpt2-nodropout", "bert", "vit")},
    **{network: {"layers": 1} for network in ("t5", "transformer")},
    "unet": {},
}
COPIED = {"unet": 0.05}
"""The least share of the ops that are copied, where it is not a third of them."""


class Enough(BaseException):
    """Ends a step that has been traced."""


@contextlib.contextmanager
def traces(copying: bool = True, planned: bool = False) -> Iterator[tuple[list[Any], list[Forms], list[str]]]:
    """While open, joint graphs are noted, with what was copied in them and what has ended their traces."""
    patch, graphs, forms, ends = pytest.MonkeyPatch(), list[Any](), list[Forms](), list[str]()
    metadata: list[Any] = []
    read: Any = _backend._Reading.read
    collect_metadata = aot_autograd.run_functionalized_fw_and_collect_metadata  # type: ignore[attr-defined]

    def noted(self: Any, joint: torch.fx.GraphModule, *args: Any, **described: Any) -> Any:
        graphs.append((described_nodes(joint.graph), list(metadata)))
        metadata.clear()
        if not planned:
            raise Enough
        return read(self, joint, *args, **described)

    def collecting(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        collect = collect_metadata(*args, **kwargs)

        def collected(*inputs: Any) -> Any:
            found = collect(*inputs)
            described = plain(found.input_info), plain(found.output_info)
            metadata.extend([described] if described not in metadata else [])  # where ops are traced anew
            return found

        return collected

    @contextlib.contextmanager
    def watched(over: Callable[[], bool], parts: Any) -> Iterator[None]:
        with alike_ops(over, parts) as own:
            forms.append(own)
            try:
                yield
            except Exception as error:
                ends.append(str(error).splitlines()[0])
                raise

    patch.setattr(_backend._Reading, "read", noted)
    patch.setattr(aot_autograd, "run_functionalized_fw_and_collect_metadata", collecting)
    patch.setattr(_aot, "alike_ops", watched if copying else lambda _over, _parts: contextlib.nullcontext())
    try:
        yield graphs, forms, ends
    finally:
        patch.undo()


def described_nodes(graph: torch.fx.Graph) -> list[Any]:
    """All that is known of a graph's nodes, without what differs from one trace to the next."""
    first = min(node.meta["seq_nr"] for node in graph.nodes if "seq_nr" in node.meta)
    return [
        (node.op, str(node.target), node.name, str(node.args), str(node.kwargs), described(node.meta, first))
        for node in graph.nodes
    ]


def described(value: Any, first: int) -> Any:
    if isinstance(value, torch.Tensor):
        lies = value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes()
        return type(value), lies, value.dtype, value.device, value.requires_grad
    if isinstance(value, (tuple, list)):
        return [described(one, first) for one in value]
    if isinstance(value, dict):
        return [(plain(key), one - first if key == "seq_nr" else described(one, first)) for key, one in value.items()]
    return plain(value)


def plain(value: Any) -> str:
    """Without objects' addresses."""
    return re.sub(r"\d{9,}", "#", repr(value))


def step_of(make: Callable[[], tuple[nn.Module, tuple[Any, ...]]], autocast: bool = False) -> None:
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    module, batch = make()
    with contextlib.suppress(Enough), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rematerialize(module, "min")(*batch)


@pytest.mark.parametrize(("network", "autocast"), diagonal(list(LAYERS), [True, False]))
def test_the_graph_is_the_one_that_is_traced(network: str, autocast: bool) -> None:
    def make() -> tuple[nn.Module, tuple[Any, ...]]:
        workload = build(network, "tiny", **LAYERS[network])
        return workload.module, workload.batch

    with traces(copying=False) as (as_traced, _, _):
        step_of(make, autocast)
    with traces() as (copied, forms, ends):
        step_of(make, autocast)
    assert len(as_traced) == len(copied) and not ends
    for (nodes, metadata), (others, other_metadata) in zip(as_traced, copied, strict=True):
        assert len(nodes) == len(others) and metadata and metadata == other_metadata
        assert not [(one, other) for one, other in zip(nodes, others, strict=True) if one != other]
    (found,) = forms
    assert found.copied > COPIED.get(network, 1 / 3) * (found.copied + found.traced)


def test_no_constant_is_taken_for_an_equal_one() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x * 1 + x * 1.0 + x * 0.0 + x * -0.0 + x * float("nan") * 0).square().mean()

    with traces() as (graphs, _, _):
        step_of(lambda: (net(forward), (inputs(),)))
    constants = [args for op, target, _, args, *_ in graphs[0][0] if target == "aten.mul.Tensor"]
    found = [args.rpartition(", ")[2].rstrip(")") for args in constants if "primals" not in args]
    assert found[:5] == ["1", "1.0", "0.0", "-0.0", "nan"]


class WritesToViews(torch.autograd.Function):
    """Its backward writes to a view, of the second of two tensors that lie alike."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        one, other = gradient * 1.5, gradient * 0.5
        flat, again = one.view(-1), other.view(-1)
        again.mul_(2)
        return other + flat.view_as(one)


def test_an_op_in_place_on_a_view_that_was_copied_has_all_traced() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.last(WritesToViews.apply(self.first(x))).square().mean()

    with traces(planned=True) as (graphs, forms, ends):
        check(net(forward), inputs())
    assert ends == ["aten.mul_.Tensor"] and issubclass(OverwrittenError, Exception)
    assert len(graphs) == 1 and forms[0].copied


def test_views_that_the_forward_writes_to_are_not_copied() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        one, other = x.sin(), x.cos()
        flat, again = one.view(-1), other.view(-1)
        again.mul_(2)
        y = other @ self.first.weight @ self.first.weight.t()  # of functionalization a view, which it does not say
        y += flat.view_as(one)
        return self.last(y).square().mean()

    with traces(copying=False) as (as_traced, _, _):
        step_of(lambda: (net(forward), (inputs().view(2, 16, 8),)))
    with traces() as (copied, forms, ends):
        step_of(lambda: (net(forward), (inputs().view(2, 16, 8),)))
    assert as_traced == copied and forms[0].copied and not ends
    check(net(forward), inputs().view(2, 16, 8))


def views(self: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs that are views of inputs, of one another and of what is no output, and an input that is written to."""
    x = self.first(x)
    parts = [*x.sin().chunk(2), *x.cos().chunk(2)]
    for one in y.chunk(4):
        one.t().add_(1)
    given, again = y.view(-1), y.view(-1).t()
    loss = self.last(torch.cat(parts) * given.sum()).square().mean()
    return {
        "loss": loss,
        "first": parts[2].t(),
        "second": parts[3],
        "given": again,
        "part": y[1].detach(),
        "same": x.t(),
    }


@pytest.mark.parametrize("written", [False, True])
def test_outputs_are_views_of_what_they_are_otherwise(written: bool) -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return views(self, x, y if written else y.sin().cos().view(-1).view_as(y))

    def make() -> tuple[nn.Module, tuple[Any, ...]]:
        return net(forward), (inputs(), torch.ones(8, 8))

    with traces(copying=False) as (as_traced, _, _):
        step_of(make)
    with traces() as (copied, forms, _):
        step_of(make)
    assert as_traced == copied and forms[0].early.copied
    check(net(forward), inputs(), torch.ones(8, 8))


@pytest.mark.parametrize("viewed_first", [False, True])
def test_ops_in_place_are_traced_with_what_they_change(viewed_first: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x.sin()
            view = x.t() if viewed_first else None
            x.mul_(2).add_(1)
            x = x.t().relu_().t() + (x if view is None else view.t())
        return self.last(x).square().mean()

    with traces(copying=False) as (as_traced, _, _):
        step_of(lambda: (net(forward), (inputs(),)))
    with traces() as (copied, _, _):
        step_of(lambda: (net(forward), (inputs(),)))
    assert as_traced == copied
    check(net(forward), inputs())


def test_what_fails_while_ops_are_copied_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise AttributeError("gone in this release of torch")

    monkeypatch.setattr(Forms, "_copy", fails)
    with traces(planned=True) as (graphs, _, ends):
        check(net(), inputs())
    assert len(graphs) == 1 and ends == ["gone in this release of torch"]


def test_nothing_that_was_traced_is_kept() -> None:
    """Not in circles either, which the garbage collector finds late, and not at all where torch's C++ is a part of them."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.first(x).tanh().t().softmax(0).t().tanh() @ self.first.weight
        return self.last(self.first(x)).square().mean()

    def traced() -> int:
        return sum(type(one) is FunctionalTensor for one in gc.get_objects())

    before = traced()
    gc.disable()
    try:
        rematerialize(net(forward), "min", cost_model="unit", time_limit=0.5)(inputs())
        assert traced() == before
    finally:
        gc.enable()


def test_what_another_thread_traces_is_left_alone() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().t().sin().t().sin()

    x, found = torch.randn(8, 8), list[torch.Tensor]()
    with alike_ops() as forms:
        run = torch.compile(function, backend="aot_eager")
        thread = threading.Thread(target=lambda: found.append(run(x)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], function(x)) and not (forms.copied or forms.traced or forms.early.copied)


@pytest.mark.parametrize("over", [False, True])
def test_what_is_traced_once_the_graph_is_there_is_left_alone(over: bool) -> None:
    """Planning may trace too."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().t().sin().t().sin()

    x = torch.randn(8, 8, requires_grad=True)
    with alike_ops(lambda: over) as forms:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        found = torch.compile(function, backend="aot_eager")(x)
    assert torch.equal(found, function(x))
    assert (forms.copied > 0) == (not over) and (forms.traced > 0) == (not over)
