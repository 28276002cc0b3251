"""Plans of graphs, and a graph that looks like a network's."""

from __future__ import annotations

from lightning_remat.graph import ComputationGraph, Op, Phase, Tensor, TensorRole
from lightning_remat.planner import Plan
from lightning_remat.schedule import simulate
from lightning_remat.solvers import NodeSequence, Problem, Solution, Status, find_smallest, solve

MIB = 2**20


def plan_of(graph: ComputationGraph, budget: float | str, method: str = "greedy") -> Plan:
    """A plan within a share of what rematerialization can save, or of the smallest peak (``"min"``)."""
    problem = Problem(graph)
    baseline = problem.evaluate(problem.captured)
    found: Solution = find_smallest(graph, 0.5)
    budget_bytes = found.peak_bytes
    if not isinstance(budget, str):
        budget_bytes = int(found.peak_bytes + budget * (baseline.peak_bytes - found.peak_bytes))
        within = solve(graph, budget_bytes, method if budget < 1 else "no_remat", 2.0)
        found = within if within.schedule is not None else found
    assert found.schedule is not None
    return Plan(
        graph=graph,
        schedule=found.schedule,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=found.peak_bytes,
        baseline_peak_bytes=baseline.peak_bytes,
        predicted_seconds=found.seconds,
        baseline_seconds=baseline.seconds,
        solver=found.method,
        status=found.status,
        lower_bound_seconds=found.lower_bound_seconds,
        bound_scope=found.bound_scope,
        solve_seconds=found.solve_seconds,
        notes=found.notes,
    )


def plan_by_blocks(graph: ComputationGraph, chain: int = 8) -> Plan:
    """A plan of a `small_transformer` that keeps what crosses its blocks, and runs each again before its backward."""
    problem = Problem(graph)
    captured = problem.captured
    nodes = list(captured.nodes[: captured.boundary])
    for node in captured.nodes[captured.boundary :]:
        name = graph.ops[node].name  # no op is a view, so nodes are ops
        if name.startswith(f"op{chain}_"):
            block = int(name.split("_")[1])
            nodes.extend(range(block * chain, (block + 1) * chain))
        nodes.append(node)
    schedule = problem.expand(NodeSequence(tuple(nodes), captured.boundary))
    baseline, timeline = problem.evaluate(captured), simulate(graph, schedule)
    return Plan(
        graph=graph,
        schedule=schedule,
        budget_bytes=timeline.peak_bytes,
        predicted_peak_bytes=timeline.peak_bytes,
        baseline_peak_bytes=baseline.peak_bytes,
        predicted_seconds=timeline.seconds,
        baseline_seconds=baseline.seconds,
        solver="by hand",
        status=Status.FEASIBLE,
        lower_bound_seconds=baseline.seconds,
        bound_scope="",
        solve_seconds=0.0,
    )


def small_transformer(
    blocks: int = 8, *, batch: int = 0, loss: str = "cross", prefix: str = "transformer", chain: int = 8
) -> ComputationGraph:
    """A step shaped like a small GPT-2's.

    Args:
        blocks: how many blocks there are.
        batch: the first dimension of the batch; 0 where shapes are not known.
        loss: what the loss calls.
        prefix: of modules' names.
        chain: ops in the forward of a block.
    """
    tensors: list[Tensor] = []
    storages: list[int] = []
    ops: list[Op] = []

    def tensor(name: str, nbytes: float, role: TensorRole = TensorRole.INTERMEDIATE, first: int = 0) -> int:
        storages.append(int(nbytes))
        shape = (int(nbytes) // 4,) if role is TensorRole.INTERMEDIATE else (first, 4) if first else ()
        tensors.append(Tensor(name, len(storages) - 1, shape, "float32", role))
        return len(tensors) - 1

    def op(name: str, target: str, reads: list[int], mib: float, ms: float, phase: Phase, module: str) -> int:
        made = tensor(f"{name}_out", mib * MIB)
        ops.append(
            Op(name, target, tuple(dict.fromkeys(reads)), (made,), phase, ms / 1e3, int(mib * MIB / 4), module=module)
        )
        return made

    weights = [tensor(f"w{i}", 3 * MIB, TensorRole.PARAMETER) for i in range(blocks)]
    x = tensor("batch", MIB, TensorRole.BATCH, batch)
    inputs, saved = [*weights, x], []
    for i, weight in enumerate(weights):
        kept = [x]
        for j in range(chain):
            module = f"{prefix}.h.{i}.{'attn' if j < chain // 2 else 'mlp'}"
            kept.append(op(f"op{j}_{i}", "mm", [kept[-1], weight], 1 + j % 4, 1.5 + j % 3, Phase.FORWARD, module))
        x = kept[-1]
        saved.append((i, weight, kept))
    logits = op("lm_head", "mm", [x, weights[0]], 15, 8.5, Phase.FORWARD, "lm_head")
    scores = op("scores", loss, [logits], 15, 2.5, Phase.LOSS, "")
    value = op("loss", "mean", [scores], 1 / 1024, 2.5, Phase.LOSS, "")
    tangent = tensor("tangent", 4, TensorRole.TANGENT)
    gradient = op("loss_backward", loss, [tangent, scores], 15, 2.5, Phase.BACKWARD, "")
    gradient = op("lm_head_backward", "mm", [gradient, weights[0]], 1, 16.5, Phase.BACKWARD, "lm_head")
    gradients = []
    for i, weight, kept in reversed(saved):
        for j in range(len(kept) - 1, 0, -1):
            mib = storages[tensors[kept[j - 1]].storage] / MIB
            module = f"{prefix}.h.{i}.{'attn' if j <= chain // 2 else 'mlp'}"
            gradient = op(f"op{j}_{i}_back", "mm", [gradient, kept[j], kept[j - 1]], mib, 5.5, Phase.BACKWARD, module)
        gradients.append(op(f"grad_{i}", "mm", [gradient, weight], 3, 2.5, Phase.BACKWARD, f"{prefix}.h.{i}"))
    return ComputationGraph(
        tuple(ops),
        tuple(tensors),
        tuple(storages),
        inputs=(*inputs, tangent),
        forward_outputs=(value,),
        backward_outputs=tuple(gradients),
        forward_resident_bytes=3 * blocks * MIB,
        name="a small transformer",
        device="cpu",
    )
