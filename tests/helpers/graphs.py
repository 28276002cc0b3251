"""Small computation graphs for tests: chains, diamonds, and random ones with views and several outputs."""

from __future__ import annotations

import random

from lightning_remat.graph import ComputationGraph, Op, Phase, Tensor, TensorRole


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
