"""One training step of several networks under every way of saving memory, compared in one run.

    python benchmarks/peers.py --network gpt2 --steps 10
    python benchmarks/peers.py --draw benchmarks/results/peers-cpu-cpu.json                # runs nothing: the picture anew
    python benchmarks/peers.py --draw benchmarks/results/peers-cpu-cpu.json --headline     # four networks: the README's

Each network runs in a process of its own, where the methods take turns (`benchmarks.comparison.measuring`): one step each in
random order, for ``--steps`` rounds. By default this project runs at the peaks that its peers were measured to reach; what
holds is told in a second table.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for when this file is run as a script

import torch
from rich.console import Console

from benchmarks import networks
from benchmarks.common.commands import add_networks, command_line
from benchmarks.common.processes import add_worker, died, found_by
from benchmarks.common.results import RESULTS, now, read, stamp, write
from benchmarks.comparison.measuring import WARM_UP, compare
from benchmarks.comparison.methods import MEMORY_BUDGETS, all_methods, at_bytes
from benchmarks.comparison.picture import picture
from benchmarks.comparison.rows import Row
from benchmarks.comparison.tables import rows_table, verdict_table
from benchmarks.comparison.verdict import Verdict, judge
from benchmarks.determinism import CUBLAS, settle

FORMAT, FORMAT_VERSION = "lightning_remat.peers", 2
PACKAGES = ("lightning_remat", "torch", "lightning", "transformers", "pytorchcv", "mip")
AT_PEERS = "peers"
"""Stands among the budgets for the peaks that the peers reach."""
BUDGETS: tuple[float | str, ...] = (1.0, AT_PEERS, "min")
HEADLINE = ("gpt2", "gpt2-nodropout", "resnet50", "unet")
"""Networks that differ: with dropout, without (there Inductor is ahead), and two of convolutions."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and write JSON and a picture; returns an exit code: 1 where a run ended without its rows."""
    options = _options(arguments)
    if options.worker:
        _work(options)
        return 0
    if options.draw:
        return _draw_anew(options.draw, options.headline)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("peers.py: --device cuda was asked for, and this machine has no CUDA device", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 200)
    out: Path = options.out or RESULTS / f"peers-{options.size}-{torch.device(options.device).type}.json"
    found: dict[str, dict[str, Any]] = {}
    if options.keep and out.exists():
        found = {result["name"]: result for result in read(out, FORMAT, 1, FORMAT_VERSION)["networks"]}
    errors = False
    for name in options.networks or networks.networks():
        result = found[name] = {**_in_own_process(name, options), "date": now(), "settings": _settings(options)}
        errors |= "error" in result
        rows = [Row.from_dict(row) for row in result["rows"]]
        if rows:
            console.print(rows_table(f"{result['description']} on {options.device}", rows))
        if result.get("verdict"):
            console.print(verdict_table("What holds", Verdict.from_dict(result["verdict"])))
        if "error" in result:
            console.print(f"{name}: {result['error']}", style="red", markup=False)
        # After each network: a long run that is ended early leaves what it has.
        _write(out, list(found.values()), options)
    console.print(f"written: {out}, and a picture beside it", markup=False, soft_wrap=True)
    return 1 if errors else 0


def _write(out: Path, found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The JSON file, and the picture where matplotlib is installed."""
    data = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        **stamp(PACKAGES, options.device),
        "settings": _settings(options),
        "networks": found,
    }
    write(out, data)
    _draw(data, out.with_suffix(".png"))


def _draw(data: dict[str, Any], path: Path, names: Sequence[str] | None = None) -> bool:
    """The picture of what a file holds, all networks unless ``names`` has some; ``False`` where none was drawn."""
    results = {result["name"]: result for result in data["networks"]}
    chosen = [results[name] for name in names or results if results[name]["rows"]]
    drawn = [(result["description"], [Row.from_dict(row) for row in result["rows"]]) for result in chosen]
    machine = data["machine"]
    where = [
        machine.get("gpu") or f"{machine['processor']}, {machine['threads']} threads",
        f"torch {data['versions']['torch']}",
    ]
    note = f"{', '.join(where)}; peaks above parameters, buffers and inputs, medians of steps timed in turns"
    return bool(drawn) and picture(drawn, path, note)


def _draw_anew(file: Path, headline: bool) -> int:
    """The picture of an older run, beside its file; returns an exit code."""
    path = file.with_name("peers-headline.png") if headline else file.with_suffix(".png")
    try:
        data = read(file, FORMAT, 1, FORMAT_VERSION)
        missing = set(HEADLINE if headline else ()) - {result["name"] for result in data["networks"]}
        if missing:
            raise ValueError(f"{file} has nothing of {', '.join(sorted(missing))}")
    except (OSError, ValueError) as error:
        print(f"peers.py: {error}", file=sys.stderr)
        return 2
    if not _draw(data, path, HEADLINE if headline else None):
        print("peers.py: nothing to draw, or no matplotlib to draw it with", file=sys.stderr)
        return 2
    print(f"written: {path}")
    return 0


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "size": options.size,
        "device": options.device,
        "steps": options.steps,
        "duels": options.duels,
        "time_limit": options.time_limit,
        "warm_up": WARM_UP,
        "deterministic": options.deterministic,
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    add_networks(parser, networks.networks())
    parser.add_argument("--size", default="cpu", choices=networks.SIZES)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each method")
    parser.add_argument(
        "--duels",
        type=int,
        default=0,
        help="further timed steps of what is compared: a peer and this project at its peak",
    )
    parser.add_argument(
        "--budgets", nargs="+", type=_budget, default=BUDGETS, help="this project's: shares, sizes, min or peers"
    )
    parser.add_argument(
        "--memory-budgets", nargs="*", type=float, default=MEMORY_BUDGETS, help="PyTorch's: activation_memory_budget"
    )
    parser.add_argument(
        "--inductor-budgets",
        nargs="*",
        type=float,
        help="the same under Inductor (needs a C++ compiler); default: as above",
    )
    parser.add_argument("--time-limit", type=float, help="seconds of this project's planner; default: its own")
    parser.add_argument("--out", type=Path, help="the JSON file; the picture goes beside it")
    parser.add_argument("--keep", action="store_true", help="keep what the file has of networks that are not run again")
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="torch.use_deterministic_algorithms; by default on CUDA, where eager may not repeat its own bits without",
    )
    parser.add_argument("--draw", type=Path, help="run nothing: draw what this JSON file holds, beside it")
    parser.add_argument(
        "--headline", action="store_true", help=f"with --draw: only {', '.join(HEADLINE)}, for the README"
    )
    add_worker(parser)
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps: give at least 1")
    if options.headline and not options.draw:
        parser.error("--headline: give --draw too")
    if options.draw and (options.networks or options.out):
        parser.error("--draw: it draws all networks of the file, beside it; leave out --network and --out")
    if options.inductor_budgets is None:
        options.inductor_budgets = options.memory_budgets
    if options.deterministic is None:
        options.deterministic = options.device.startswith("cuda")
    return options


def _budget(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _in_own_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What was found for one network: ``name``, ``description``, ``rows``, and ``error`` where its process failed."""
    command = [str(Path(__file__).resolve()), "--network", name]
    command += ["--size", options.size, "--device", options.device, "--steps", str(options.steps)]
    command += ["--deterministic" if options.deterministic else "--no-deterministic"]
    command += ["--duels", str(options.duels)]
    for option in ("budgets", "memory_budgets", "inductor_budgets"):
        command += [f"--{option.replace('_', '-')}", *map(str, getattr(options, option))]
    command += [] if options.time_limit is None else ["--time-limit", str(options.time_limit)]
    # It measures costs from scratch: the planning seconds of the first budget are those of a first run.
    found, exit_code = found_by(command, dict([CUBLAS]) if options.deterministic else {})
    result: dict[str, Any] = found or {"name": name, "description": name, "rows": []}
    return {**result, "error": died(exit_code)} if exit_code else result


def _work(options: argparse.Namespace) -> None:
    """Compare the methods on one network, in this process."""
    (name,) = options.networks
    workload = networks.build(name, options.size, options.device)
    nondeterministic = ""
    if options.deterministic:
        # Whether eager repeats itself in spite of an op without a deterministic kernel is in its row.
        trial = copy.deepcopy(workload.module)
        nondeterministic = settle(lambda: trial(*workload.batch).backward())
        del trial
    budgets = [one for one in options.budgets if one != AT_PEERS]
    rows = compare(
        workload,
        all_methods(budgets, options.memory_budgets, options.inductor_budgets, options.time_limit),
        options.steps,
        options.duels,
        say=lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True),
        at_peers=functools.partial(at_bytes, time_limit=options.time_limit) if AT_PEERS in options.budgets else None,
    )
    result = {
        "name": name,
        "description": workload.description,
        "nondeterministic": nondeterministic,
        "rows": [row.to_dict() for row in rows],
    }
    if AT_PEERS in options.budgets:
        result["verdict"] = judge(rows).to_dict()
    write(options.worker, result)


if __name__ == "__main__":
    sys.exit(main())
