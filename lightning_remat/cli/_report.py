"""The commands ``report`` and ``explain``: what there is to see and to say of a plan."""

from __future__ import annotations

from pathlib import Path

from lightning_remat._disk import replace_file
from lightning_remat.cli._solve import Case, Say, holds, planned
from lightning_remat.errors import ConfigError
from lightning_remat.graph import ComputationGraph
from lightning_remat.planner import Plan
from lightning_remat.report import analyse, compared_page


def plan_of(path: Path, budget: str | None, time_limit: float, say: Say) -> Plan:
    """The plan in a file; of a graph file, one within a budget.

    Raises:
        ConfigError: for a graph without a budget, or a plan with one.
        GraphError: where it is neither a graph nor a plan.
        RematError: where there is no schedule within the budget.
    """
    if not holds(path, "graph"):
        if budget is not None:
            raise ConfigError(f"--budget {budget}: {path} is no graph file, and a plan has its budget")
        say("reading the plan")
        return Plan.load(path)
    if budget is None:
        raise ConfigError(f"{path} is a graph: give the --budget to plan it within, or a plan file")
    case = Case(ComputationGraph.load(path), time_limit, say)
    return planned(case, budget, "auto", {})


def compare(one: Path, other: Path, out: Path) -> None:
    """Write the page of two plans.

    Raises:
        GraphError: where one of them is no plan.
        RematError: where Bokeh is not installed.
    """
    pages = [analyse(Plan.load(path)) for path in (one, other)]
    names = (one.stem, other.stem) if one.stem != other.stem else (str(one), str(other))
    replace_file(out, compared_page(pages[0], pages[1], names))
