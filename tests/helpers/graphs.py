"""Small computation graphs for tests: chains, diamonds, and random ones with views and several outputs."""

from __future__ import annotations

import random

from lightning_remat.graph import ComputationGraph, Op, Phase, Tensor, TensorRole
from lightning_remat.solvers import NodeSequence, Problem


def unit_chain(layers: int) -> ComputationGraph:
    """f1..fn, loss, bn..b1 with unit costs and sizes; b_l reads its successor in the chain, f_l and f_(l-1)."""
    names = [f"f{i}" for i in range(1, layers + 1)] + ["loss"] + [f"b{i}" for i in range(layers, 0, -1)]
    index = {name: i for i, name in enumerate(names)}
    ops = []
    for i, name in enumerate(names):
        reads = [i - 1] if i else []
        if name.startswith("b"):
            layer = int(name[1:])
            reads += [index[f"f{k}"] for k in (layer, layer - 1) if k >= 1]
        phase = Phase.BACKWARD if name.startswith("b") else Phase.LOSS if name == "loss" else Phase.FORWARD
        ops.append(Op(name, name, tuple(dict.fromkeys(reads)), (i,), phase, seconds=1.0))
    tensors = tuple(Tensor(f"{name}_out", i) for i, name in enumerate(names))
    return ComputationGraph(tuple(ops), tensors, (1,) * len(names), backward_outputs=(len(names) - 1,))


def random_graph(
    seed: int,
    forward_ops: int = 6,
    backward_ops: int = 6,
    *,
    multi_output: bool = True,
    overwriting: bool = True,
    only_views: tuple[Phase, ...] = (),
) -> ComputationGraph:
    """A random training-like graph: inputs, forward ops, a loss handed out, tangent, backward ops, gradients.

    Some ops are views, have two outputs, are random or not recomputable, or (with ``overwriting``) may overwrite an input;
    costs and sizes vary, zeros included. All ops of the phases ``only_views`` are views.
    """
    rng = random.Random(seed)
    tensors: list[Tensor] = []
    storages: list[int] = []
    ops: list[Op] = []

    def tensor(nbytes: int | None, storage: int | None = None, role: TensorRole = TensorRole.INTERMEDIATE) -> int:
        if storage is None:
            storages.append(nbytes or 0)
            storage = len(storages) - 1
        tensors.append(Tensor(f"t{len(tensors)}", storage, role=role))
        return len(tensors) - 1

    parameters = [tensor(rng.randint(1, 4), role=TensorRole.PARAMETER) for _ in range(rng.randint(1, 2))]
    forward: list[int] = []
    inputs = list(parameters)

    def overwritable(chosen: list[int]) -> tuple[int, ...]:
        """Inputs alone on their storage, of the size of the first of them."""
        read = [tensors[t].storage for t in chosen]
        alone = [
            t for t in chosen if read.count(tensors[t].storage) == 1 and tensors[t].role is TensorRole.INTERMEDIATE
        ]
        return tuple(t for t in alone if storages[tensors[t].storage] == storages[tensors[alone[0]].storage])

    def add(pool: list[int], phase: Phase, must: int | None = None) -> None:
        chosen = rng.sample(pool, min(len(pool), rng.randint(1, 3)))
        if must is not None and must not in chosen:
            chosen.append(must)
        kind = 0.0 if phase in only_views else rng.random()
        if kind < 0.15:
            outputs = (tensor(None, storage=tensors[chosen[0]].storage),)
            ops.append(Op(f"view{len(ops)}", "view", (chosen[0],), outputs, phase))
        else:
            count = 2 if multi_output and kind > 0.7 else 1
            over = overwritable(chosen) if overwriting and count == 1 and rng.random() < 0.6 else ()
            size = storages[tensors[over[0]].storage] if over else None
            outputs = tuple(tensor(rng.randint(0, 6) if size is None else size) for _ in range(count))
            ops.append(
                Op(
                    f"op{len(ops)}",
                    "op",
                    tuple(chosen),
                    outputs,
                    phase,
                    seconds=float(rng.randint(0, 5)),
                    workspace_bytes=rng.choice([0, 0, 0, 2]),
                    random=phase is Phase.FORWARD and rng.random() < 0.1,
                    recomputable=rng.random() > 0.1,
                    overwritable=over,
                )
            )
        pool.extend(outputs)

    pool = list(parameters)
    for _ in range(forward_ops):
        add(pool, Phase.FORWARD, must=pool[-1])
    forward = pool[len(parameters) :]
    loss = forward[-1]
    tangent = tensor(1, role=TensorRole.TANGENT)
    inputs.append(tangent)
    pool = [*pool, tangent]
    chain = tangent
    for _ in range(backward_ops):
        add(pool, Phase.BACKWARD, must=chain)
        chain = pool[-1]
    backward = [t for op in ops if op.phase is Phase.BACKWARD for t in op.outputs]
    gradients = tuple(dict.fromkeys([backward[-1], rng.choice(backward)])) if backward else ()
    transient = tuple(t for t in [rng.choice(forward)] if t != loss)
    return ComputationGraph(
        tuple(ops),
        tuple(tensors),
        tuple(storages),
        inputs=tuple(inputs),
        forward_outputs=(loss,),
        forward_transient=transient,
        backward_outputs=gradients,
        resident_bytes=rng.randint(0, 3),
        forward_resident_bytes=rng.randint(0, 3),
        name=f"random-{seed}",
    )


def recomputing_sequence(problem: Problem, seed: int) -> NodeSequence:
    """The captured order with random extra evaluations of earlier nodes put in wherever the data allow."""
    rng = random.Random(seed)
    nodes: list[int] = []
    boundary = 0
    for node in range(len(problem)):
        if node == problem.boundary:
            boundary = len(nodes)
        for earlier in sorted(rng.sample(range(node), min(node, rng.randint(0, 2)))):
            if problem.recomputable[earlier] and (len(nodes) >= boundary or not problem.is_backward[earlier]):
                nodes.append(earlier)
        nodes.append(node)
    return NodeSequence(tuple(nodes), boundary if problem.boundary < len(problem) else len(nodes))


def joined_branches() -> ComputationGraph:
    """A gradient `g` has two branches, joined in the end; `small` is captured first, and waits for `large`."""
    ops: list[Op] = []
    sizes: list[int] = []

    def op(name: str, reads: tuple[int, ...], size: int, phase: Phase, workspace: int = 0) -> int:
        ops.append(Op(name, name, reads, (len(ops),), phase, seconds=1.0, workspace_bytes=workspace))
        sizes.append(size)
        return len(ops) - 1

    loss = op("loss", (), 1, Phase.FORWARD)
    g = op("g", (loss,), 4, Phase.BACKWARD)
    a = op("a", (g,), 1, Phase.BACKWARD)
    small = op("small", (a,), 8, Phase.BACKWARD)
    b = op("b", (g,), 2, Phase.BACKWARD)
    large = op("large", (b,), 8, Phase.BACKWARD, workspace=12)
    op("sum", (small, large), 1, Phase.BACKWARD)
    tensors = tuple(Tensor(f"{one.name}_out", index) for index, one in enumerate(ops))
    return ComputationGraph(tuple(ops), tensors, tuple(sizes), forward_outputs=(0,), backward_outputs=(len(ops) - 1,))


PARAMETERS = 7


def chain_at(batch_size: int) -> ComputationGraph:
    """A unit chain of 8 layers whose values grow with the batch, beside bytes that do not."""
    graph = unit_chain(8)
    return graph.replace(storages=(batch_size,) * len(graph.ops), resident_bytes=PARAMETERS)


def figure_1() -> ComputationGraph:
    names = "ABCDE"
    reads = {"A": "", "B": "A", "C": "B", "D": "BC", "E": "AD"}
    ops = tuple(Op(n, n, tuple(names.index(r) for r in reads[n]), (i,), seconds=1.0) for i, n in enumerate(names))
    tensors = tuple(Tensor(f"{n}_out", i) for i, n in enumerate(names))
    return ComputationGraph(ops, tensors, (1,) * 5, forward_outputs=(4,))
