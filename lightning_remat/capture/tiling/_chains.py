"""Chains of ops that run slice by slice: attention written out, a loss with its smoothing, what lies between two products.

A chain is what hangs together by large tensors, over ops that may run so (see ``_rules``). Its forward part is one op then, and
its backward part another, which computes again what it reads of the forward: the large tensors inside of the two are never
there as a whole, neither while an op runs nor from the forward to the backward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
import torch.fx

from lightning_remat.capture import _ops, _own_functions
from lightning_remat.capture._call import TensorSpec
from lightning_remat.capture._nodes import is_tensor, primals_and_tangents
from lightning_remat.capture._sorting import sort
from lightning_remat.capture._torch import hint
from lightning_remat.capture.tiling._losses import pick_targets
from lightning_remat.capture.tiling._rounding import rounds_alike
from lightning_remat.capture.tiling._rules import in_slices, is_elementwise, place_of, read_places
from lightning_remat.capture.tiling._sliced import Chain, Grid, Place, least_bytes, seen_to_be_exact

aten = torch.ops.aten
Node = torch.fx.Node

WORTH_IT = 2
"""Large tensors that have to be gone for a chain to run in slices: one alone is written over by the op that reads it."""

ALIGNED_BYTES = 16
"""On CUDA, kernels read in vectors of so many bytes: how they go about a row depends on where it begins."""


def tile_chains(graph: torch.fx.Graph) -> bool:
    """Have the chains of a joint graph run in slices, where these have the same bits; returns whether there are any."""
    pick_targets(graph)
    search = _Search(graph)
    found = 0
    for seed in sorted(filter(search.may_begin, graph.nodes), key=_nbytes, reverse=True):
        if seed not in search.seen:
            region = search.around(seed)
            if region is not None:
                found += region.replace(graph)
    return found > 0 and sort(graph)


class _Search:
    """Looks for chains in a joint graph.

    Attributes:
        seen: ops that have been looked at.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        _, tangents = primals_and_tangents(graph)
        self.seen = set[Node]()
        self._handed_out = set(graph.output_node().all_input_nodes)
        self._backward = set[Node](tangents)
        for node in graph.nodes:
            if any(source in self._backward for source in node.all_input_nodes):
                self._backward.add(node)
        self._number = {node: number for number, node in enumerate(graph.nodes)}

    def may_begin(self, node: Node) -> bool:
        """Whether a chain may be looked for around an op's result."""
        if not _tensor_of_op(node) or _ops.is_view(node.target) or node.meta["val"].dim() < 2:
            return False
        return _nbytes(node) >= 2 * least_bytes(node.meta["val"].device)

    def around(self, seed: Node) -> _Region | None:
        """The chain that an op is of, over the grid by which most of its large tensors are gone."""
        found: _Region | None = None
        for depth in range(seed.meta["val"].dim() - 1, 0, -1):
            region = self._over(seed, tuple(seed.meta["val"].shape[:depth]))
            if region is not None and (found is None or region.gone > found.gone):
                found = region
        return found

    def _over(self, seed: Node, grid: Grid) -> _Region | None:
        large = seed.meta["val"].numel() / 2
        inside, waiting = set[Node](), [seed]
        while waiting:
            node = waiting.pop()
            if node in inside or not self._fits(node, grid):
                continue
            inside.add(node)
            if node.meta["val"].numel() >= large:
                waiting += node.users
            waiting += [one for one in node.all_input_nodes if is_tensor(one) and one.meta["val"].numel() >= large]
        self.seen |= inside
        inside -= set(_outer_views(inside))
        if math.prod(grid) < 2 or _gone(inside, large) < WORTH_IT:
            return None
        parts = [self._closed(part, grid) for part in (inside - self._backward, inside & self._backward)]
        if any(part is None for part in parts):
            return None
        forward, backward = (sorted(part or (), key=self._number.__getitem__) for part in parts)
        return _Region(grid, forward, backward, _gone({*forward, *backward}, large))

    def _fits(self, node: Node, grid: Grid) -> bool:
        if not _tensor_of_op(node) or node in self._handed_out or node.meta.get("remat_once"):
            return False
        return read_places(node, grid) is not None

    def _closed(self, part: set[Node], grid: Grid) -> set[Node] | None:
        """Ops, and those that lie between them; ``None`` where one of these may not run in slices."""
        if not part:
            return part
        first, *_, last = sorted(map(self._number.__getitem__, part)) * 2
        after = _reached(part, lambda node: (n for n in node.users if self._number.get(n, last) <= last))
        if not after.intersection(_read(part)):
            return part
        before = _reached(part, lambda node: (n for n in node.all_input_nodes if self._number.get(n, first) >= first))
        between = after & before
        return part | between if all(self._fits(node, grid) for node in between) else None


@dataclasses.dataclass(frozen=True)
class _Region:
    """The ops of a chain, in order.

    Attributes:
        grid: over which they run.
        forward: those of the forward.
        backward: those of the backward.
        gone: how many large tensors are nowhere as a whole any more.
    """

    grid: Grid
    forward: Sequence[Node]
    backward: Sequence[Node]
    gone: int

    def replace(self, graph: torch.fx.Graph) -> bool:
        """Put a function that runs in slices in the place of each part; returns whether slices have the bits of the whole."""
        inside = {*self.forward, *self.backward}
        computed = self._computed_again()
        again = [node for node in self.forward if node in computed]
        parts = [
            (part, ops, sorted(returned, key=_nbytes, reverse=True))
            for part, ops in ((self.forward, self.forward), (self.backward, [*again, *self.backward]))
            if (returned := _read_outside(part, inside))
        ]
        chains = [_chain(ops, returned, self.grid) for _, ops, returned in parts]
        if not all(chain is not None and seen_to_be_exact(chain[0]) for chain in chains):
            return False
        for (part, _, returned), chain in zip(parts, chains, strict=True):
            assert chain is not None
            put(part, returned, *chain, inside)
        for node in reversed([*self.forward, *self.backward]):
            graph.erase_node(node)
        return True

    def _computed_again(self) -> set[Node]:
        """What the backward part reads of the forward part, and what that is computed from."""
        forward = set(self.forward)
        found, waiting = set[Node](), [n for n in _read(self.backward) if n in forward]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += [n for n in node.all_input_nodes if n in forward]
        return found


def _gone(inside: Collection[Node], large: float) -> int:
    """How many tensors of at least so many numbers no op outside reads; views are none."""
    read_outside = _read_outside(inside, inside)
    gone = (node for node in inside if node not in read_outside and not _ops.is_view(node.target))
    return sum(node.meta["val"].numel() >= large for node in gone)


def _chain(ops: Sequence[Node], returned: Sequence[Node], grid: Grid) -> tuple[Chain, list[Node]] | None:
    """Ops as a chain, and the nodes that are its inputs; ``None`` where slices would not be the cells' own."""
    inside, program = set(ops), torch.fx.Graph()
    places = {node: read_places(node, grid) or {} for node in ops}
    given: dict[tuple[Node, Place], Node] = {}
    values: dict[Node, Node] = {}
    for node in ops:
        for source, place in places[node].items():
            if source in inside:
                own = place_of(source.meta["val"], grid)
                if own is None or not _same_cells(own, place, grid):
                    return None
            elif (source, place) not in given:
                given[source, place] = program.placeholder(f"given_{len(given)}")
    cells = [program.placeholder(f"cells_{number}") for number in range(len(grid))]
    for number, node in enumerate(ops):

        def value(source: Node, node: Node = node) -> Node:
            return values[source] if source in inside else given[source, places[node][source]]

        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), value)
        target, args = in_slices(node, args, cells, grid)
        values[node] = program.create_node("call_function", target, args, kwargs, name=f"made_{number}")
    program.output(tuple(values[node] for node in returned))
    inputs = tuple((_spec(node), place) for node, place in given)
    made = ((_spec(node), place_of(node.meta["val"], grid)) for node in returned)
    outputs = tuple((spec, place) for spec, place in made if place is not None)
    if not all(spec.whole for spec, _ in outputs):
        return None
    cell_bytes = [_nbytes(node) // math.prod(grid) for node in ops]
    if outputs[0][0].device.type == "cuda" and any(n % ALIGNED_BYTES for n in cell_bytes):
        return None
    nodes = [node for node, _ in given]
    once = {number for number, node in enumerate(nodes) if nodes.count(node) == 1}
    overwritable = frozenset(number for number in once if inputs[number] == outputs[0])
    chain = Chain(torch.fx.GraphModule({}, program), grid, inputs, outputs, max(cell_bytes), overwritable)
    alike = (rounds_alike(node, math.prod(grid), chain.cells) for node in ops if is_elementwise(node))
    return (chain, nodes) if all(alike) else None


def _same_cells(one: Place, other: Place, grid: Grid) -> bool:
    """Whether both have the cells in the same places, but for dimensions with one cell."""
    alike = (a == b or size == 1 for a, b, size in zip(one.dims, other.dims, grid, strict=True))
    return one.merged == other.merged and all(alike)


def put(
    part: Sequence[Node],
    returned: Sequence[Node],
    chain: Chain,
    inputs: Sequence[Node],
    inside: Collection[Node],
) -> None:
    """Have ``returned`` computed by a chain, for all but those ``inside``."""
    _own_functions.put(part[-1], chain.function(), inputs, returned, max(part, key=_nbytes), "in_slices", inside)


def _outer_views(ops: Collection[Node]) -> Iterator[Node]:
    """Views of what is none of these ops' result, and those that are read outside alone: they take nothing as a whole."""
    left = set(ops)
    found = True
    while found:
        found = False
        for node in [n for n in left if _ops.is_view(n.target)]:
            if not left.intersection(node.all_input_nodes) or not left.intersection(node.users):
                left.remove(node)
                found = True
                yield node


def _reached(ops: Collection[Node], on: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """What is reached from ops, over nodes that are none of them."""
    found, waiting = set[Node](), [other for node in ops for other in on(node)]
    while waiting:
        node = waiting.pop()
        if node not in found and node not in ops:
            found.add(node)
            waiting += on(node)
    return found


def _read_outside(ops: Iterable[Node], inside: Collection[Node]) -> list[Node]:
    """Those ops of which something else than those ``inside`` reads the result."""
    return [node for node in ops if any(user not in inside for user in node.users)]


def _read(ops: Iterable[Node]) -> set[Node]:
    return {source for node in ops for source in node.all_input_nodes}


def _tensor_of_op(node: Node) -> bool:
    return node.op == "call_function" and is_tensor(node)


def _nbytes(node: Node) -> int:
    return _spec(node).nbytes


def _spec(node: Node) -> TensorSpec:
    return TensorSpec.of(node.meta["val"], hint)
