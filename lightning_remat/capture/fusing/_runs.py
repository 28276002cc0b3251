"""Runs of ops in the order of an unscheduled step: those between two others that hang together are one op.

A run ends where something else reads what it has computed: so nothing outside lies between its ops, and it can be in the
place of the last. Forward and backward share none. A backward's run computes again what takes it no more memory to read than
the forward's result would (`_compute_again`): noise of a mask, a sum of what is kept for another op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.fx

from lightning_remat.capture import _ops
from lightning_remat.capture._call import TensorSpec
from lightning_remat.capture._nodes import primals_and_tangents, producer
from lightning_remat.capture._order import execution_order
from lightning_remat.capture._own_functions import put
from lightning_remat.capture._sorting import sort
from lightning_remat.capture._torch import hint
from lightning_remat.capture.fusing._fused import Run, compile_runs
from lightning_remat.capture.fusing._opened import open_norms
from lightning_remat.capture.fusing._rules import CONSTANTS, is_inside_view, may_be_fused
from lightning_remat.capture.fusing._spread import spread_by_products
from lightning_remat.graph import Phase

Node = torch.fx.Node

MOST_TENSORS = 24
"""The most tensors that a run reads and returns: all of them are there at once while it runs. (What is only between its ops is
nowhere in memory.)"""


def fuse_runs(graph: torch.fx.Graph, num_fwd_outputs: int, *, exact: bool) -> bool:
    """Put one function in the place of each run of ops in a joint graph; returns whether there are any."""
    if not exact:
        open_norms(graph)
        spread_by_products(graph)
    _compute_again(graph, num_fwd_outputs)
    runs = _runs(_order(graph, num_fwd_outputs), exact)
    number = {node: number for number, node in enumerate(graph.nodes)}
    compile_runs(_cut(members, number, exact).run for members in runs)
    found = sum(_replace(graph, members, exact) for members in runs)
    return found > 0 and sort(graph)


def _order(graph: torch.fx.Graph, num_fwd_outputs: int) -> list[tuple[Node, Phase]]:
    outputs = tuple(graph.output_node().args[0])  # type: ignore[arg-type]
    _, tangents = primals_and_tangents(graph)
    return execution_order(graph, tangents, outputs[:num_fwd_outputs], outputs[num_fwd_outputs:])


# -- what is computed again -------------------------------------------------------------------------------------------


def _compute_again(graph: torch.fx.Graph, num_fwd_outputs: int) -> None:
    """Have the backward compute again what it reads of the forward, where all that this is made of is kept anyway."""
    order = _order(graph, num_fwd_outputs)
    backward = {node for node, phase in order if phase is Phase.BACKWARD}
    backward |= {node for node in graph.nodes if producer(node) in backward}
    kept = {source for node in backward for source in node.all_input_nodes if source not in backward}
    for node, phase in order:
        readers = {user for user in node.users if user in backward}
        if phase is Phase.BACKWARD or not readers or not all(may_be_fused(one, exact=True) for one in (node, *readers)):
            continue
        if not all(_at_hand(source, node, kept) for source in node.all_input_nodes):
            continue
        with graph.inserting_after(node):
            again = graph.node_copy(node)
        node.replace_all_uses_with(again, delete_user_cb=readers.__contains__)
        kept.discard(node)


def _at_hand(source: Node, node: Node, kept: Collection[Node]) -> bool:
    """Whether it costs little to keep what an op reads: it is kept anyway, or small beside the op's result.

    What the step is given is not: it may be changed before the backward, in which eager mode reads what it has computed.
    """
    if source.target in CONSTANTS:
        return True
    root = source
    while _ops.is_view(root.target):
        root = root.all_input_nodes[0]
    return root.op == "call_function" and (source in kept or _nbytes(source) * 2 <= _nbytes(node))


# -- finding runs -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Members:
    """The ops of a run, in order, and the views of their results that they read."""

    backward: bool
    ops: list[Node]
    views: set[Node] = dataclasses.field(default_factory=set)

    def is_read_by(self, node: Node) -> bool:
        return any(source in self.ops or source in self.views for source in node.all_input_nodes)

    def may_take(self, node: Node, backward: bool) -> bool:
        """Whether a run is of the same phase and device, and takes few enough tensors with another op."""
        ops = {*self.ops, node}
        inside = ops | self.views
        read = {source for op in ops for source in op.all_input_nodes} - inside
        returned = [op for op in ops if not inside.issuperset(op.users)]
        alike = all(op.meta["val"].device == node.meta["val"].device for op in self.ops)
        return self.backward == backward and alike and len(read) + len(returned) <= MOST_TENSORS

    def reads_with(self, node: Node) -> bool:
        """Whether an op reads a tensor that the run reads, and makes as many numbers."""
        read = {source for op in self.ops for source in op.all_input_nodes}
        return not read.isdisjoint(node.all_input_nodes) and self.ops[-1].meta["val"].shape == node.meta["val"].shape


def _merged(runs: Sequence[_Members], backward: bool) -> _Members:
    """One run of several, which hang together by the op that it has yet to take."""
    ops = [op for run in runs for op in run.ops]
    views = {view for run in runs for view in run.views}
    return _Members(runs[0].backward if runs else backward, ops, views)


def _runs(order: Sequence[tuple[Node, Phase]], exact: bool) -> list[_Members]:
    """The runs of a step."""
    done: list[_Members] = []
    waiting: list[_Members] = []
    last: _Members | None = None  # with nothing but views since
    for node, phase in order:
        backward = phase is Phase.BACKWARD
        read = [run for run in waiting if run.is_read_by(node)]
        if is_inside_view(node):
            for run in read:
                run.views.add(node)
            continue
        if not may_be_fused(node, exact):
            waiting = [run for run in waiting if run not in read]
            done += read
            last = None
            continue
        beside = [last] if not read and last is not None and last.reads_with(node) else []
        run = _merged([*read, *beside], backward)
        if not run.may_take(node, backward):
            done += read
            run = _Members(backward, [])
            beside = []
        run.ops.append(node)
        waiting = [one for one in waiting if one not in read and one not in beside]
        waiting.append(run)
        last = run
    return [run for run in (*done, *waiting) if len(run.ops) > 1]


# -- putting a function in their place --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A run as it is cut out of a graph.

    Attributes:
        run: what is put in its place.
        inputs: nodes that it reads.
        returned: its ops that others read.
        gone: nodes that are not in the graph any more then.
    """

    run: Run
    inputs: list[Node]
    returned: list[Node]
    gone: set[Node]


def _cut(members: _Members, number: Mapping[Node, int], exact: bool) -> _Cut:
    """How a run is cut out, where nodes come in the order of their numbers."""
    ops = set(members.ops)
    inside, left = set(ops), set[Node]()  # views that lead to the run's ops, and those that others read, which stay
    for view in sorted(members.views, key=number.__getitem__, reverse=True):
        if not inside.isdisjoint(view.users):
            inside.add(view)
        if any(user in left or (user not in ops and user not in members.views) for user in view.users):
            left.add(view)
    given = set() if exact else _given_views(inside)
    inside |= given
    read = {source for node in left for source in node.all_input_nodes}
    stays = [node for node in members.ops if node in read or any(u not in ops | members.views for u in node.users)]
    returned = sorted(stays, key=_nbytes, reverse=True)
    program, inputs = _program(sorted(inside, key=number.__getitem__), returned)
    run = Run(program, tuple(map(_spec, inputs)), tuple(map(_spec, returned)), exact)
    return _Cut(run, inputs, returned, (ops | members.views | given) - left)


def _given_views(inside: Collection[Node]) -> set[Node]:
    """Views that lead to a run's nodes, and to nothing else, of what the run is given."""
    found = set[Node]()
    waiting = [source for node in inside for source in node.all_input_nodes]
    while waiting:
        view = waiting.pop()
        if is_inside_view(view) and view not in inside and all(user in inside or user in found for user in view.users):
            found.add(view)
            waiting += view.all_input_nodes
    return found


def _replace(graph: torch.fx.Graph, members: _Members, exact: bool) -> bool:
    """Put a compiled function in the place of a run's ops; returns whether there is one, with eager's numbers if ``exact``."""
    number = {node: number for number, node in enumerate(graph.nodes)}
    cut = _cut(members, number, exact)
    kernel = cut.run.kernel()
    if kernel is None:
        return False
    place, ops = max(members.ops, key=number.__getitem__), set(members.ops)
    put(place, cut.run.function(kernel), cut.inputs, cut.returned, cut.returned[0], "fused", ops)
    for node in sorted(cut.gone, key=number.__getitem__, reverse=True):
        graph.erase_node(node)
    return True


def _program(nodes: Sequence[Node], returned: Sequence[Node]) -> tuple[torch.fx.GraphModule, list[Node]]:
    """Ops, and views between them, as a graph of their own, and the nodes that are its inputs."""
    program, values = torch.fx.Graph(), dict[Node, Node]()
    outside = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in nodes)
    inputs = [node for node in outside if node.target not in CONSTANTS]
    for source in inputs:
        values[source] = program.placeholder(f"given_{len(values)}")
    for node in (*(node for node in outside if node not in values), *nodes):
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        values[node] = program.create_node("call_function", node.target, args, kwargs, name=f"made_{len(values)}")
        values[node].meta["val"] = node.meta["val"]
    program.output(tuple(values[node] for node in returned))
    return torch.fx.GraphModule({}, program), inputs


def _spec(node: Node) -> TensorSpec:
    return TensorSpec.of(node.meta["val"], hint)


def _nbytes(node: Node) -> int:
    value = node.meta.get("val")
    return _spec(node).nbytes if isinstance(value, torch.Tensor) else 0
