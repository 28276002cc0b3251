"""The backward of a schedule, for tangents that arrive with other layouts than it was made for.

The step is traced once more with such tangents (see ``capture._tangents``); the forward is the same then. So the
schedule is carried over: its forward is what has run, its backward evaluates the same ops again, and takes what was
saved. An op that only the other trace has, such as the copy of a reshape, runs as soon as what it reads is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

import torch.fx

from lightning_remat.capture import CapturedGraph, target_name
from lightning_remat.errors import ScheduleError
from lightning_remat.graph import Host
from lightning_remat.lowering._aten import HOST, Key, lower_backward, needed_from_forward
from lightning_remat.schedule import Compute, Copy, Free, Schedule, Step, verify

Node = torch.fx.Node


def relaid_backward(captured: CapturedGraph, schedule: Schedule, other: CapturedGraph) -> torch.fx.GraphModule:
    """The backward of ``schedule`` on ``captured``, for the tangents that ``other`` was traced with.

    It takes what the forward module of ``lower(captured, schedule)`` has saved.

    Args:
        captured: the graph as it was captured.
        schedule: by which its forward has run.
        other: the same function, traced for tangents of other layouts.

    Raises:
        ScheduleError: where the two traces differ in more than how gradients are passed on.
    """
    return _Carried(captured, schedule, other).backward()


class _Carried:
    """A schedule of one trace, carried over to another: which ops, tensors and nodes of the two are the same.

    Args:
        captured: the one trace.
        schedule: its schedule.
        other: the other trace.
    """

    def __init__(self, captured: CapturedGraph, schedule: Schedule, other: CapturedGraph) -> None:
        self.captured, self.schedule, self.other = captured, schedule, other
        self.nodes = _matched(list(captured.module.graph.nodes), list(other.module.graph.nodes))
        places = {node: i for i, node in enumerate(other.nodes)}
        self.ops: dict[int, int] = {}
        for i, node in enumerate(captured.nodes):
            if node is not None and (place := places.get(self.nodes.get(node))) is not None:
                self.ops[i] = place
        self.tensors: dict[int, int] = {}
        for node, tensor in captured.node_tensor.items():
            if (found := other.node_tensor.get(self.nodes.get(node))) is not None:  # type: ignore[arg-type]
                self.tensors[tensor] = found
        for one, another in self.ops.items():
            pairs = zip(captured.graph.ops[one].outputs, other.graph.ops[another].outputs, strict=False)
            for tensor, found in pairs:
                self.tensors.setdefault(tensor, found)

    def backward(self) -> torch.fx.GraphModule:
        """The backward module of the other trace."""
        carried, graph = self._schedule(), self.other.graph
        if any(isinstance(step, Copy) for step in carried.steps):  # within what was planned: the forward is the same
            graph = graph.replace(host=Host(sum(graph.storages), 1.0, 1.0), device=str(self.other.device))
        verify(graph, carried)
        saved = [self._key(key) for key in needed_from_forward(self.captured, self.schedule)]
        known = {self._name(key) for key in saved}
        for key in needed_from_forward(self.other, carried):
            if self._name(key) not in known:
                raise ScheduleError(f"the backward of the other trace reads {key}, which was not saved")
        return lower_backward(self.other, carried, saved)

    def _schedule(self) -> Schedule:
        """The schedule, with the other trace's ops and tensors in the place of the one's."""
        graph = self.other.graph
        steps: list[Step] = []
        present = set(graph.inputs)
        own = sorted(set(range(len(graph.ops))) - set(self.ops.values()))  # ops that only the other trace has
        boundary = len(self.schedule.steps)

        def compute(op: int, over: int = -1) -> None:
            if over not in graph.ops[op].overwritable:  # its layout is another now
                over = -1
            steps.append(Compute(op, over))
            if over >= 0:
                present.difference_update(graph.tensors_on[graph.tensors[over].storage])
            present.update(graph.ops[op].outputs)

        def compute_own() -> None:
            for op in list(own):  # in order: one may be all that the next one waits for
                if present.issuperset(graph.ops[op].inputs):
                    own.remove(op)
                    compute(op)

        for number, step in enumerate(self.schedule.steps):
            if number == self.schedule.boundary:
                boundary = len(steps)
                compute_own()
            if isinstance(step, Free):
                tensor = self.tensors.get(step.tensor)
                if tensor in present and tensor is not None:
                    present.discard(tensor)
                    steps.append(Free(tensor))
            elif isinstance(step, Copy):
                copied = self.tensors.get(step.tensor)
                if copied is None:
                    raise ScheduleError(f"{self.captured.graph.tensors[step.tensor].name} is not in the other trace")
                steps.append(step._replace(tensor=copied))
                if step.to_device and step.ended:
                    present.add(copied)
                    if number >= self.schedule.boundary:
                        compute_own()
            elif (op := self.ops.get(step.op)) is not None:
                compute(op, self.tensors.get(step.over, -1) if step.over >= 0 else -1)
                if number >= self.schedule.boundary:
                    compute_own()
            elif number < self.schedule.boundary and self.captured.nodes[step.op] is not None:
                raise ScheduleError(f"{self.captured.graph.ops[step.op].name} is not in the forward of the other trace")
        return Schedule(tuple(steps), min(boundary, len(steps)))

    def _key(self, key: Key) -> Key:
        """What is saved, named by the other trace's nodes and ops."""
        if isinstance(key, Node):
            found = self.nodes.get(key)
            if found is None:
                raise ScheduleError(f"{key.name} was saved, and is not in the other trace")
            return found
        name, index = key
        return name, self.tensors[index] if name == HOST else self.ops[index]

    def _name(self, key: Key) -> object:
        return self.other.node_tensor.get(key, key) if isinstance(key, Node) else key


def _matched(nodes: Sequence[Node], others: Sequence[Node]) -> dict[Node, Node]:
    """Nodes of two traces of one function that correspond: alike by `_label`, and with inputs that correspond."""
    labels, other_labels = [*map(_label, nodes)], [*map(_label, others)]
    shorter = min(len(nodes), len(others))
    first = next((i for i in range(shorter) if labels[i] != other_labels[i]), shorter)
    last = next((i for i in range(shorter - first) if labels[-1 - i] != other_labels[-1 - i]), shorter - first)
    end, other_end = len(nodes) - last, len(others) - last
    blocks = SequenceMatcher(
        None, labels[first:end], other_labels[first:other_end], autojunk=False
    ).get_matching_blocks()
    pairs = [*zip(nodes[:first], others[:first], strict=True)]
    for i, j, size in blocks:
        pairs += zip(nodes[first + i : first + i + size], others[first + j : first + j + size], strict=True)
    pairs += zip(nodes[end:], others[other_end:], strict=True)
    found: dict[Node, Node] = {}
    for node, other in pairs:
        sources, other_sources = node.all_input_nodes, other.all_input_nodes
        if len(sources) == len(other_sources) and all(
            found.get(a, b) is b for a, b in zip(sources, other_sources, strict=True)
        ):
            found[node] = other
    return found


def _label(node: Node) -> tuple[str, str]:
    return node.op, str(node.target) if node.op == "placeholder" else target_name(node.target)
