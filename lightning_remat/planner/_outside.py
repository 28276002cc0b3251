"""What runs between a captured graph's forward and its backward, and takes memory there.

A step may be captured as several graphs: what the first one keeps is alive while the others run. The others' need is put
into the first graph as one more op at the end of its forward, whose workspace it is: no solver has to know of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lightning_remat.capture import CapturedGraph
from lightning_remat.graph import Op, Phase
from lightning_remat.planner._plan import Plan
from lightning_remat.solvers import find_smallest


def with_outside(captured: CapturedGraph, nbytes: int) -> CapturedGraph:
    """The graph with ``nbytes`` needed by others between its forward and its backward."""
    graph = captured.graph
    at = graph.boundary
    outside = Op(
        name="outside",
        target="outside",
        inputs=graph.forward_outputs,
        outputs=(),
        phase=Phase.LOSS,
        workspace_bytes=nbytes,
        recomputable=False,
    )
    return dataclasses.replace(
        captured,
        graph=graph.replace(ops=(*graph.ops[:at], outside, *graph.ops[at:])),
        nodes=(*captured.nodes[:at], None, *captured.nodes[at:]),
        calls=(*captured.calls[:at], None, *captured.calls[at:]),
    )


def kept_bytes(plan: Plan) -> int:
    """What the forward of a plan leaves behind: saved for the backward, and held by the caller."""
    return plan.timeline().saved_bytes


def least_needs(plans: Sequence[Plan], time_limit: float) -> list[int]:
    """For each graph of a call, the bytes that the graphs after it need at the least while it waits for its backward."""
    own: list[int] = []
    kept: list[int] = []
    for plan in plans:
        smallest = find_smallest(plan.graph, time_limit)
        assert smallest.schedule is not None
        own.append(smallest.peak_bytes - plan.graph.input_bytes - plan.graph.resident_bytes)
        kept.append(kept_bytes(dataclasses.replace(plan, schedule=smallest.schedule)))
    needs = [0] * len(plans)
    for i in reversed(range(len(plans) - 1)):
        needs[i] = max(own[i + 1], kept[i + 1] + needs[i + 1])
    return needs
