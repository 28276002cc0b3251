"""The command line: parses arguments, runs a command, prints tables. An error is one line, with exit status 2."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_remat._version import __version__
from lightning_remat.cli._progress import Progress
from lightning_remat.errors import BudgetError, ConfigError, RematError, SolverError
from lightning_remat.report import format_bytes, format_seconds, plan_table

DIFFERENT = 1
"""Exit status of a check that did not find the bits equal, and of the doctor where something is wrong."""

FAILED = 2
"""Exit status after an error of the project or of the system; the same as argparse's."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""

Command = Callable[[argparse.Namespace, Console], int | None]
"""Runs one command with its parsed arguments; returns an exit status where it is not 0."""

BUDGET = (
    "bytes, a size such as 8GiB, a share of what rematerialization can save such as 50%% or 0.5, min (the smallest peak that "
    "is found), or auto (what this machine has)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``lightning-remat``.

    Args:
        arguments: the arguments; by default those of the command line.

    Returns:
        The exit status: 0, 1 where a check did not find the bits equal or the doctor something wrong, 2 after an error, or
        130 after Ctrl-C.
    """
    try:
        given = _parser().parse_args(arguments)
    except SystemExit as end:  # argparse has said what is wrong, or printed its help
        return int(end.code or 0)
    if given.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    console, errors = _console(), _console(stderr=True)
    try:
        command: Command = given.command
        return command(given, console) or 0
    except (RematError, OSError) as error:
        if given.verbose:
            logging.getLogger(__name__).info("the error in full", exc_info=error)
        words = " ".join([str(error), *getattr(error, "__notes__", ())]).split()
        errors.print(f"lightning-remat: error: {' '.join(words)}", markup=False, highlight=False, soft_wrap=True)
        return FAILED
    except KeyboardInterrupt:
        errors.print("lightning-remat: interrupted")
        return INTERRUPTED


def _console(stderr: bool = False) -> Console:
    """A console whose tables are not squeezed into 80 columns where the output is no terminal."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=200)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-remat", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("-v", "--verbose", action="store_true", help="log what is done, and show errors in full")

    def add(name: str, command: Command, help: str) -> argparse.ArgumentParser:  # noqa: A002
        added = commands.add_parser(name, parents=[shared], help=help, description=f"{help[0].upper()}{help[1:]}.")
        added.set_defaults(command=command)
        return added

    capture = add("capture", _capture, "make a network and a batch, and save its training step as a graph file")
    capture.add_argument("factory", metavar="MODULE:FACTORY", help="a function that returns a module and its batch")
    capture.add_argument("-o", "--out", type=Path, help="the graph file (by default FACTORY.json)")
    capture.add_argument("--cost", default="roofline", metavar="MODEL", help=_COST)
    capture.add_argument("--argument", action="append", default=[], metavar="NAME=VALUE", help="passed to the factory")
    capture.add_argument(
        "--device", default="cpu", help="where tensors are made; other than cpu only with their memory"
    )
    capture.add_argument("--real", action="store_true", help="make the network with its memory, as --cost profile does")
    capture.add_argument("--no-old-gradients", action="store_true", help="none of the step before live in the forward")
    capture.add_argument("--resident", metavar="SIZE", help="held on the device beside, such as an optimizer's state")

    check = add("check", _check, "run a network as planned and in eager mode, and compare the two bit for bit")
    check.add_argument("factory", metavar="MODULE:FACTORY", help="a function that returns a module and its batch")
    check.add_argument("--budget", default="50%", help=f"{BUDGET} (50%%)")
    check.add_argument("--device", default="cpu", help="where tensors are made (%(default)s)")
    check.add_argument("--precision", choices=PRECISIONS, help="by default all is as the factory makes it")
    check.add_argument("--deterministic", action="store_true", help="under torch.use_deterministic_algorithms(True)")
    check.add_argument("--method", default="auto", help="how to solve (%(default)s)")
    check.add_argument(
        "--cost", default="profile", metavar="MODEL", help="what ops cost: profile, roofline, flops, unit"
    )
    check.add_argument("--time-limit", type=float, default=30.0, metavar="SECONDS", help="of each solve (%(default)g)")
    check.add_argument("--argument", action="append", default=[], metavar="NAME=VALUE", help="passed to the factory")
    check.add_argument("-o", "--out", type=Path, help="where to save the report, as JSON")

    doctor = add(
        "doctor", _doctor, "say what this machine has, and test planning on it: to be pasted where help is asked for"
    )
    doctor.add_argument(
        "--device", default="", help="where the test runs: cpu, or cuda (by default where there is one)"
    )
    doctor.add_argument("--no-test", action="store_true", help="only look")

    solving = argparse.ArgumentParser(add_help=False)
    solving.add_argument("graph", type=Path, metavar="GRAPH", help="a graph file, or a plan file: its step")
    solving.add_argument(
        "--time-limit", type=float, default=30.0, metavar="SECONDS", help="of each solve (%(default)g)"
    )

    def add_solving(name: str, command: Callable[..., None], help: str) -> argparse.ArgumentParser:  # noqa: A002
        added = commands.add_parser(
            name, parents=[solving, shared], help=help, description=f"{help[0].upper()}{help[1:]}."
        )
        added.set_defaults(command=command)
        return added

    one = add_solving("solve", _solve, "schedule a graph within a budget, and save the plan")
    one.add_argument("--budget", required=True, help=BUDGET)
    one.add_argument("--method", default="auto", help="how to solve (%(default)s)")
    one.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="the method's own; may be repeated"
    )
    one.add_argument("-o", "--out", type=Path, help="where to save the plan, with its schedule, as JSON")
    one.add_argument("--picture", type=Path, help="where to draw the memory over the step (needs matplotlib)")

    many = add_solving("compare", _compare, "run several methods on a graph at one budget")
    many.add_argument("--budget", required=True, help=BUDGET)
    many.add_argument("--methods", nargs="+", metavar="METHOD", help="by default all")

    report = add("report", _report, "make a page about a plan, or compare two plans on one: an HTML file")
    report.add_argument("plan", type=Path, nargs="?", metavar="PLAN", help=_PLAN)
    report.add_argument("-o", "--out", type=Path, help="the page (by default beside the plan)")
    report.add_argument("--diff", type=Path, nargs=2, metavar=("A", "B"), help="two plan files to compare")
    explain = add("explain", _explain, "say what sets the peak of a plan, module by module, and what would help most")
    explain.add_argument("plan", type=Path, metavar="PLAN", help=_PLAN)
    for about in (report, explain):
        about.add_argument("--budget", help=f"of a graph file: {BUDGET}")
        about.add_argument("--no-curve", action="store_true", help="leave out what the step costs at other budgets")
        about.add_argument("--time-limit", type=float, default=10.0, metavar="SECONDS", help="of a solve (%(default)g)")

    curve = add_solving("curve", _curve, "run methods over many budgets: what memory costs in time")
    curve.add_argument("--methods", nargs="+", metavar="METHOD", default=["auto"], help="by default auto")
    curve.add_argument(
        "--points", type=int, default=8, metavar="N", help="budgets, from the smallest peak up (%(default)s)"
    )
    curve.add_argument(
        "-o", "--out", type=Path, help="a JSON file; the picture lies beside it (by default GRAPH.curve.json)"
    )
    return parser


_DESCRIPTION = "Rematerialization: training steps as graphs, and schedules for them within a memory budget."
_EPILOG = (
    "lightning-remat capture my_networks:gpt2 --cost roofline:A100-80 -o gpt2.json; lightning-remat solve gpt2.json "
    "--budget 50% -o plan.json"
)
_COST = (
    "what ops cost: roofline (%(default)s; estimated), roofline:DEVICE (such as roofline:A100-80), flops, unit, or profile "
    "(measured on the device). With flops and unit, what the tables call time is FLOPs and numbers of ops"
)

_PLAN = "a plan file, or a graph file, which is planned first"

PRECISIONS = ("64-true", "32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")
"""Precisions of a check, as Lightning names them."""

_NO_SECONDS = {"flops": "FLOPs", "unit": "ops"}
"""Cost models whose costs are not seconds, and what they count instead."""


# -- commands -------------------------------------------------------------------------------------------------------------


def _capture(given: argparse.Namespace, console: Console) -> None:
    from lightning_remat.cli._capture import captured_graph, load_factory, make_step
    from lightning_remat.solvers import Problem

    real = given.real or given.cost == "profile" or given.device != "cpu"
    factory, arguments = load_factory(given.factory), _pairs(given.argument)
    name = given.factory.rpartition(":")[2]
    with Progress() as progress:
        progress("making the network")
        captured = captured_graph(
            lambda: make_step(factory, arguments, real),
            cost_model=given.cost,
            real=real,
            device=given.device,
            name=name,
            old_gradients=not given.no_old_gradients,
            resident_bytes=_size(given.resident),
            progress=progress,
        )
    graph = captured.graph
    out = given.out or Path(f"{name}.json")
    graph.save(out)
    problem = Problem(graph)
    baseline = problem.evaluate(problem.captured)
    unit = _NO_SECONDS.get(given.cost)
    step = f"{baseline.seconds:,.0f} {unit}" if unit is not None else format_seconds(baseline.seconds)
    _lines(
        console,
        f"{name}: {len(graph.ops):,} ops, {len(problem):,} of them no views; {format_bytes(graph.floor_bytes)} held whatever "
        f"the schedule, peak {format_bytes(baseline.peak_bytes)} without rematerialization, {step} a step ({given.cost})",
        *captured.notes,
        f"saved to {out}",
    )


def _check(given: argparse.Namespace, console: Console) -> int:
    from lightning_remat.cli._capture import load_factory, make_step
    from lightning_remat.cli._check import checked

    factory, arguments = load_factory(given.factory), _pairs(given.argument)
    with Progress() as progress:
        progress("making the network")
        report = checked(
            lambda: make_step(factory, arguments, real=True),
            device=given.device,
            precision=given.precision,
            deterministic=given.deterministic,
            progress=progress,
            budget=given.budget,
            solver=given.method,
            cost_model=given.cost,
            time_limit=given.time_limit,
        )
    _lines(console, *report.summary().splitlines())
    if given.out is not None:
        report.save(given.out)
        _lines(console, f"saved to {given.out}")
    return 0 if report.equal else DIFFERENT


def _doctor(given: argparse.Namespace, console: Console) -> int:
    import torch

    from lightning_remat._doctor import examine

    kinds = ("cpu", "cuda")
    if given.device.partition(":")[0] not in ("", *kinds):
        raise ConfigError(f"--device {given.device}: give one of {', '.join(kinds)}")
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wrong = 0
    with Progress() as progress:
        progress("looking around")
        for found in examine(device, test=not given.no_test, progress=progress):
            _lines(console, str(found))
            wrong += found.wrong
    _lines(console, "all is well" if not wrong else f"{wrong} of these are not as they should be, and marked (!)")
    return DIFFERENT if wrong else 0


def _solve(given: argparse.Namespace, console: Console) -> None:
    from lightning_remat.cli._solve import Case, checked_options, graph_in, planned
    from lightning_remat.report import plan_figure

    options = checked_options(given.method, _pairs(given.option))
    with Progress() as progress:
        case = Case(graph_in(given.graph), given.time_limit, progress)
        plan = planned(case, given.budget, given.method, options)
    console.print(plan_table({case.graph.name or given.graph.stem: plan}))
    _lines(console, f"{plan.status.sentence} ({plan.bound_scope})", *plan.notes)
    if given.out is not None:
        plan.save(given.out)
        _lines(console, f"saved to {given.out}")
    if given.picture is not None:
        figure = plan_figure(plan)
        figure.savefig(given.picture)
        _lines(console, f"drawn to {given.picture}")


def _compare(given: argparse.Namespace, console: Console) -> None:
    from lightning_remat.cli._solve import Case, compared, graph_in
    from lightning_remat.solvers import available

    methods = _known_methods(given.methods or available())
    with Progress() as progress:
        case = Case(graph_in(given.graph), given.time_limit, progress)
        budget_bytes = case.budget_bytes(given.budget)
        plans, failures = compared(case, budget_bytes, methods)
    console.print(plan_table(plans, title=case.graph.name))
    _lines(console, *failures)


def _curve(given: argparse.Namespace, console: Console) -> None:
    from lightning_remat.cli._solve import Case, curve, graph_in
    from lightning_remat.report import curve_figure

    if given.points < 1:
        raise ConfigError(f"--points {given.points}: give at least one")
    methods = _known_methods(given.methods)
    with Progress() as progress:
        case = Case(graph_in(given.graph), given.time_limit, progress)
        points, failures = curve(case, methods, given.points)
    ran = [method for method in methods if any(point.method == method for point in points)]
    table = Table(title=case.graph.name)
    for heading in ("budget", *ran):
        table.add_column(heading, justify="right", no_wrap=True)
    for budget in sorted({point.budget_bytes for point in points}):
        row = {point.method: point for point in points if point.budget_bytes == budget}
        cells = [f"{row[m].overhead:+.1%}" if row[m].peak_bytes else row[m].status for m in ran]
        table.add_row(f"{format_bytes(budget)} ({budget / case.baseline.peak_bytes:.0%})", *cells)
    console.print(table)
    out: Path = given.out or given.graph.with_suffix(".curve.json")
    record = {
        "graph": case.graph.name,
        "floor_bytes": case.graph.floor_bytes,
        "baseline_peak_bytes": case.baseline.peak_bytes,
        "baseline_seconds": case.baseline.seconds,
        "time_limit": given.time_limit,
        "points": [point.to_dict() for point in points],
    }
    out.write_text(json.dumps(record, indent=1), encoding="utf-8")
    _lines(console, *failures, f"saved to {out}")
    if importlib.util.find_spec("matplotlib") is None:
        _lines(console, "no picture: matplotlib is not installed (pip install 'lightning-remat[pictures]')")
        return
    lines = {m: [(p.budget_bytes, p.overhead) for p in points if p.method == m and p.peak_bytes] for m in ran}
    picture = out.with_suffix(".png")
    curve_figure(lines, case.baseline.peak_bytes, case.graph.name).savefig(picture)
    _lines(console, f"drawn to {picture}")


def _report(given: argparse.Namespace, console: Console) -> None:
    from lightning_remat.cli._report import compare, plan_of

    if (given.plan is None) == (given.diff is None):
        raise ConfigError("report: give a plan file, or --diff with two of them")
    out: Path = given.out or (given.plan or given.diff[1]).with_suffix(".html" if given.plan else ".diff.html")
    with Progress() as progress:
        if given.diff is not None:
            progress("comparing the plans")
            compare(given.diff[0], given.diff[1], out)
        else:
            plan = plan_of(given.plan, given.budget, given.time_limit, progress)
            progress("drawing" if given.no_curve else "looking at other budgets")
            plan.report(out, curve_seconds=0 if given.no_curve else given.time_limit)
    _lines(console, f"saved to {out}")


def _explain(given: argparse.Namespace, console: Console) -> None:
    from lightning_remat.cli._report import plan_of

    with Progress() as progress:
        plan = plan_of(given.plan, given.budget, given.time_limit, progress)
        progress("looking at other budgets")
        words = plan.explain(curve_seconds=0 if given.no_curve else given.time_limit)
    _lines(console, words)


# -- what is typed --------------------------------------------------------------------------------------------------------


def _pairs(given: Sequence[str]) -> dict[str, Any]:
    """``name=value`` pairs; a value that is no Python literal is text."""
    found: dict[str, Any] = {}
    for pair in given:
        name, separator, text = pair.partition("=")
        if not (separator and name):
            raise ConfigError(f"{pair!r}: give NAME=VALUE")
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found


def _size(text: str | None) -> int:
    """Bytes of a size; 0 where none was given."""
    from lightning_remat.budget import BudgetKind, parse_budget

    if text is None:
        return 0
    size = parse_budget(text)
    if size.kind is not BudgetKind.SIZE:
        raise BudgetError(f"--resident {text!r}: give bytes, or a size such as '2GiB'")
    return int(size.value or 0)


def _known_methods(methods: Sequence[str]) -> list[str]:
    """The methods, each once, all of them known."""
    from lightning_remat.solvers import available

    for method in methods:
        if method not in available():
            raise SolverError(f"unknown solver {method!r}: choose one of {', '.join(available())}")
    return list(dict.fromkeys(methods))


def _lines(console: Console, *texts: str) -> None:
    for text in texts:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
