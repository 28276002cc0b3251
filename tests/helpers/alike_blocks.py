"""Blocks that are alike, or nearly so, and what Dynamo makes of steps that call them, with and without copies of calls."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._guards import Source, TracingContext

from lightning_remat import rematerialize
from lightning_remat.capture import _torch as internals
from lightning_remat.capture._torch import _aot
from lightning_remat.capture._torch._guards import source_name
from lightning_remat.capture._torch.alike._copies import Copy
from lightning_remat.runtime import _backend
from tests.capture.test_alike import Enough, described_nodes
from tests.helpers.nets import inputs, loss_of, net, same

Tensor = torch.Tensor


class Seen:
    """What Dynamo has made.

    Attributes:
        graphs: the joint graphs.
        given: where what they are given is found.
        guards: of the graphs.
        copied: the names of modules for which the call of another was copied.
    """

    def __init__(self) -> None:
        self.graphs: list[Any] = []
        self.given: list[list[str]] = []
        self.guards: list[set[Any]] = []
        self.copied: list[str] = []


@contextlib.contextmanager
def watched(copying: bool = True, planned: bool = True) -> Iterator[Seen]:
    """While open, what Dynamo makes is noted; steps end there, unless they are planned."""
    patch, seen = pytest.MonkeyPatch(), Seen()
    read: Any = _backend._Reading.read
    init: Any = _aot.Frame.__init__
    made: Any = Copy.made

    def noted(self: Any, joint: torch.fx.GraphModule, *args: Any, **described: Any) -> Any:
        seen.graphs.append(described_nodes(joint.graph))
        seen.guards.append({described_guard(one) for one in TracingContext.get().guards_context.dynamo_guards})
        if not planned:
            raise Enough
        return read(self, joint, *args, **described)

    def framed(self: Any, module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        given = [node.meta.get("grapharg") for node in module.graph.find_nodes(op="placeholder")]
        seen.given.append([source_name(one.source) if one is not None and one.source else "" for one in given])
        init(self, module, *args, **kwargs)

    def copied(self: Any) -> Any:
        seen.copied.append(self.name.rpartition("]")[2].removeprefix(".") or self.name)
        return made(self)

    patch.setattr(_backend._Reading, "read", noted)
    patch.setattr(_aot.Frame, "__init__", framed)
    patch.setattr(Copy, "made", copied)
    if not copying:
        patch.setattr(internals, "alike_modules", contextlib.nullcontext)
    try:
        yield seen
    finally:
        patch.undo()


def described_guard(guard: Any) -> Any:
    check = guard.create_fn
    held = (*check.args, *check.keywords.values()) if isinstance(check, functools.partial) else ()
    function = check.func if isinstance(check, functools.partial) else check
    parts = [source_name(one) if isinstance(one, Source) else repr(type(one)) for one in held]
    try:
        where = source_name(guard.originating_source)
    except NotImplementedError:
        where = type(guard.originating_source).__name__
    return re.sub(r"_{3}\d+|\d{9,}(_c\d+)?", "#", f"{function.__name__} {where} {parts}")


def unlike(without: Seen, with_copies: Seen) -> list[Any]:
    """What is otherwise: nodes, inputs, and guards."""
    found: list[Any] = []
    for nodes, others in zip(without.graphs, with_copies.graphs, strict=True):
        assert len(nodes) == len(others)
        found += [(one, other) for one, other in zip(nodes, others, strict=True) if one != other]
    found += [pair for pair in zip(without.given, with_copies.given, strict=True) if pair[0] != pair[1]]
    for guards, others in zip(without.guards, with_copies.guards, strict=True):
        found += [one for one in guards ^ others if "type(L[" not in one]  # of classes, each guarded on for one module
    return found


class Block(nn.Module):
    def __init__(self, body: Callable[..., Any], number: int) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.1)
        self.body, self.number, self.scale = body, number, 1.5
        self.register_buffer("steps", torch.zeros(()))
        self.settings: dict[str, Any] = {"power": 2.0}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, x, *args, **kwargs)


def body(self: Any, x: Tensor) -> Tensor:
    return x + self.drop(torch.tanh(self.linear(self.norm(x))) * self.scale)


def powered(self: Any, x: Tensor) -> Tensor:
    return (body(self, x).sin().abs() + 0.1) ** self.settings["power"]


def called(self: Any, x: Tensor) -> Tensor:
    x = self.first(x)
    for one in self.blocks:
        x = one(x)
    return self.last(x).square().mean()


def blocks(its_body: Callable[..., Any] = body, forward: Callable[..., Any] = called) -> Any:
    torch.manual_seed(0)
    return net(forward, blocks=nn.ModuleList(Block(its_body, number) for number in range(3)))


def whole(seen: Seen) -> set[int]:
    """The blocks that were copied as a whole."""
    found = [re.fullmatch(r".*?blocks\.(\d)", name) for name in seen.copied]
    return {int(one[1]) for one in found if one}


def check_deeply(module: Any) -> Any:
    """`check`, for modules that cannot be copied with what is bound to them."""
    state = copy.deepcopy(module.state_dict())
    right, got = list[Any](), list[Any]()
    for found, step in ((right, module), (got, rematerialize(module, "min", cost_model="unit", time_limit=0.5))):
        module.load_state_dict(state)
        module.zero_grad()
        torch.manual_seed(1)
        for _ in range(2):
            loss = loss_of(step(inputs()))
            loss.backward()
            found += [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in module.parameters())]
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.1 * parameter.grad)
        found += [value.clone() for value in module.state_dict().values()]
    assert len(right) == len(got) and all(map(same, right, got))
    return step
