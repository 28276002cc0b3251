"""Gradients that leave a captured backward while it runs, so that their reduction over processes runs beside it.

A captured backward is one node of autograd's graph, which returns all gradients when it has ended; only then would
`DistributedDataParallel` begin to reduce them. So it runs in **stages**: it stops where the gradients of a stage are there,
and goes on when autograd has passed these on. The node itself runs the first stage, a node behind it the second, and so
on; each is the source of the gradients of its own parameters. Stages follow eager mode's order of gradients, and so does
what autograd comes to in a stage (see ``_order``): buckets are those of eager mode.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from lightning_remat.capture import _torch as internals
from lightning_remat.capture.gradients._shared import handed_in, is_view, may_lie_in, source_of
from lightning_remat.capture.gradients._taken import Taken

FIRST_BYTES = 1024 * 1024
"""Bytes of the gradients of the first stage, and the least of each further one: DDP's first bucket is of this size."""

MOST_BYTES = 25 * 1024 * 1024
"""The most bytes of a stage, about: DDP's further buckets are of this size."""

MOST_STAGES = 16
"""So many stages, about: each takes some 0.1 ms of Python."""

Gradients = list[torch.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Stages:
    """The gradients of each stage of a backward, two or more.

    Attributes:
        arguments: positions of the parameters among the arguments, in eager mode's order of their gradients.
        outputs: positions of their gradients among what the backward returns.
        count: how many gradients the backward returns.
    """

    arguments: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    count: int

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return len(self.arguments) - 1

    def are_of(self, args: Sequence[Any]) -> bool:
        """Whether what a call is given in their places are parameters whose gradients autograd accumulates."""
        given = (args[argument] for stage in self.arguments for argument in stage)
        return all(type(one) is torch.nn.Parameter and one.requires_grad for one in given)


def stages_of(
    order: Sequence[int], nbytes: Callable[[int], int], gradient_arguments: Sequence[int | None], *, fine: bool
) -> Stages | None:
    """The stages of a backward; ``None`` where there is one only.

    Args:
        order: positions of the arguments that get gradients, in eager mode's order.
        nbytes: bytes of the gradient of an argument.
        gradient_arguments: of each gradient that the backward returns, the argument's position.
        fine: whether small gradients have stages too, since less memory is held so.
    """
    places = {argument: place for place, argument in enumerate(gradient_arguments) if argument is not None}
    total = sum(map(nbytes, order))
    least = min(FIRST_BYTES, total // MOST_STAGES) if fine else FIRST_BYTES
    following = min(MOST_BYTES, max(least, total // MOST_STAGES))
    stages: list[list[int]] = [[]]
    made, enough = 0, least
    for argument in order:
        if made >= enough:
            stages.append([])
            made, enough = 0, following
        stages[-1].append(argument)
        made += nbytes(argument)
    if len(stages) == 1 or not places.keys() >= set(order):
        return None
    return Stages(
        tuple(map(tuple, stages)),
        tuple(tuple(places[one] for one in stage) for stage in stages),
        len(gradient_arguments),
    )


def in_stages(backward: torch.fx.GraphModule, stages: Stages) -> torch.fx.GraphModule:
    """A backward that hands out the gradients of each stage but the last where they are there, and returns that one's.

    A gradient is there once nothing reads what lies in its memory any more: autograd may keep it as it is then.
    """
    graph, copies = torch.fx.Graph(), dict[Node, Node]()
    outputs: Any = backward.graph.output_node().args[0]
    nodes = [node for node in backward.graph.nodes if node.op != "output"]
    place = {node: i for i, node in enumerate(nodes)}
    given = sum(node.op == "placeholder" for node in nodes)
    ends: dict[int, list[int]] = {}  # by the place of a node, the stages that end behind it
    there = given - 1
    for number, stage in enumerate(stages.outputs[:-1]):
        there = max([there, *(_last_read(outputs[i], place) for i in stage if isinstance(outputs[i], Node))])
        ends.setdefault(there, []).append(number)

    def copy(node: Node) -> Node:
        if node not in copies:  # a view may be made before its turn
            copies[node] = graph.node_copy(node, copy)
        return copies[node]

    def gradients(number: int) -> tuple[Any, ...]:
        return tuple(copy(one) if isinstance(one := outputs[i], Node) else one for i in stages.outputs[number])

    for i, node in enumerate(nodes):
        copy(node)
        for number in ends.get(i, ()):
            graph.call_function(internals.hand_out, (gradients(number),))
    graph.output(gradients(stages.last))
    return internals.unwritten(backward, graph)


def _last_read(gradient: Node, place: dict[Node, int]) -> int:
    """The place of the last node that reads something in a gradient's memory, or makes it. (To make a view reads nothing.)"""
    source = source_of(gradient)
    found, left, seen = place[source], [source], {source}
    while left:
        for user in left.pop().users:
            if user.op == "output" or user in seen:
                continue
            if not is_view(user):
                found = max(found, place[user])
            if may_lie_in(user):
                seen.add(user)
                left.append(user)
    return found


class StagedBackward:
    """One call's backward in stages.

    Args:
        stages: the gradients of each.
        taken: told which gradients autograd has, and knows which it has already.
        shared: positions of the arguments whose gradients share memory (see ``_shared``).
    """

    def __init__(self, stages: Stages, taken: Taken, shared: Collection[int] = ()) -> None:
        self.stages, self._taken, self._shared = stages, taken, shared
        # Of each stage, places among its arguments of those whose gradients autograd waits for, and these.
        self._waiting: list[dict[int, torch.Tensor]] = []
        self._running: Generator[Gradients, None, Sequence[Any]] | None = None
        self._whole: Sequence[Any] | None = None
        self._dropped: Collection[int] = ()
        self._done: Callable[[], None] | None = None
        self._as_autocast_is: Callable[[], Any] = contextlib.nullcontext

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """The call's arguments: autograd comes to the parameters of the first stage through these, to others through nodes.

        Autograd goes on first with what was made last.
        """
        given = list(args)
        self._waiting = [
            {place: args[i] for place, i in enumerate(stage) if not self._taken.is_handed(args[i])}
            for stage in self.stages.arguments
        ]
        waiting = [
            [stage[place] for place in places]
            for stage, places in zip(self.stages.arguments, self._waiting, strict=True)
        ]
        stage: Any = _Stage.apply
        chained: Any = _Chained.apply
        device, token = args[self.stages.arguments[0][0]].device, None
        for number in range(self.stages.last, 0, -1):
            views = {i: handed_in(args[i], i in self._shared) for i in reversed(waiting[number])}
            token = stage(self, number, device, token, *(views[i] for i in waiting[number]))
            for i in self.stages.arguments[number]:
                given[i] = args[i].detach()
        first = self.stages.arguments[0]
        for i in reversed(first):
            given[i] = handed_in(args[i], i in self._shared) if i in waiting[0] else args[i].detach()
        given[first[0]] = chained(given[first[0]], token)
        return given

    def begin(
        self,
        running: Generator[Gradients, None, Sequence[Any]],
        dropped: Collection[int],
        done: Callable[[], None] | None,
    ) -> list[Any]:
        """Run the first stage; returns all gradients, those of later stages ``None``.

        Args:
            running: the backward, as `in_stages` has it.
            dropped: positions of those that are ``None``.
            done: called when the last stage has run.
        """
        self._running, self._whole, self._dropped, self._done = running, None, dropped, done
        self._as_autocast_is = internals.as_autocast_is()
        found: list[Any] = [None] * self.stages.count
        for place, gradient in zip(self.stages.outputs[0], self._next(0), strict=True):
            found[place] = gradient
        return found

    def begin_with(self, found: Sequence[Any]) -> list[Any]:
        """All gradients are there already: as `begin`."""
        self._running, self._whole = None, list(found)
        returned = list(found)
        for stage in self.stages.outputs[1:]:
            for place in stage:
                returned[place] = None
        return returned

    def gradients(self, number: int) -> Gradients:
        """The gradients of a later stage, which runs now, for which autograd waits."""
        if self._whole is not None:
            found = [self._whole[place] for place in self.stages.outputs[number]]
            if number == self.stages.last:
                self._whole = None
        else:
            self._taken.hand(filter(internals.accumulates_into, self._waiting[number - 1].values()))
            found = self._next(number)
        return [found[place] for place in self._waiting[number]]

    def _next(self, number: int) -> Gradients:
        """Run one stage."""
        assert self._running is not None
        found: Gradients
        try:
            with self._as_autocast_is():
                handed = next(self._running)
            found = list(handed)
            handed.clear()  # nothing but what is returned refers to them
        except StopIteration as ended:
            found = list(ended.value)
            self._running = None
        except BaseException:
            self._running = None
            raise
        if number == self.stages.last and self._done is not None:
            done, self._done = self._done, None
            done()
        if self._dropped:
            places = self.stages.outputs[number]
            found = [None if place in self._dropped else one for place, one in zip(places, found, strict=True)]
        return found


class _Stage(torch.autograd.Function):
    """A node that runs one stage: its result is read by the node of the stage before, and comes from that of the next."""

    @staticmethod
    def forward(
        ctx: Any,
        staged: StagedBackward,
        number: int,
        device: torch.device,
        following: torch.Tensor | None,
        *_parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.staged, ctx.number, ctx.follows = staged, number, following is not None
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=device)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        # The token has it run where the parameters' device has its nodes run.
        return None, None, None, token if ctx.follows else None, *ctx.staged.gradients(ctx.number)


class _Chained(torch.autograd.Function):
    """The identity, with the second stage behind it."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        ctx.device = following.device
        ctx.set_materialize_grads(False)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        return gradient, torch.empty(0, device=ctx.device)
