"""The process that solves python-mip's programs for `_mip`, which starts it by its path, so that it imports no torch.

Requests come by the standard input, pickled: the first has the import path, and each that follows what has changed in
the program since the last. When the input ends, the other process has ended, and so does this one.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import sys
import threading
import traceback
from array import array
from typing import Any, BinaryIO

IDLE_SECONDS = 300.0
"""A process that has no program and is given none for so many seconds ends."""

BEGINNING = b"\0lightning_remat\0"
"""Bytes before the first answer, after what the interpreter may have printed when it started."""

LONGEST_SECONDS = 1e9
"""Stands for no time limit: python-mip does not pass an infinite one on to CBC, which would keep its last one."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    answers.write(BEGINNING)
    answers.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # CBC prints the first linear program of a model whatever the verbosity
        os.dup2(nowhere, descriptor)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(os.fdopen(os.dup(0), "rb"), requests), daemon=True).start()
    sys.path[:] = requests.get()["path"]
    os.chdir(os.sep)  # the folder that it was started in may be removed, and CBC would crash then
    model = None
    while True:
        try:
            request = requests.get(timeout=IDLE_SECONDS if model is None else None)
        except queue.Empty:
            os._exit(0)
        try:
            if "solver" in request and request["solver"] is None:
                model = None
                continue
            if "solver" in request:
                model = _new(request["solver"])
                answer: dict[str, Any] = {}
            else:
                answer = _solve(model, request)
        except Exception:  # noqa: BLE001  # told to the other process
            answer = {"failed": traceback.format_exc()}
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


def _listen(stream: BinaryIO, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Queue requests, in a thread of its own: that the other process ends must be noticed during a search, too."""
    try:
        while True:
            requests.put(pickle.load(stream))
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:  # noqa: BLE001 - nobody would hear of it
        os._exit(1)


def _new(solver: str) -> Any:
    """An empty program, solved once with an integer variable in it: CBC then solves its relaxations twice as fast."""
    mip = importlib.import_module("mip")
    model = mip.Model(sense=mip.MINIMIZE, solver_name=solver)
    model.verbose, preprocess = 0, model.preprocess
    integer = model.add_var(var_type=mip.BINARY)
    model.preprocess = 0
    model.optimize(max_seconds=10.0)
    model.remove(integer)
    model.preprocess = preprocess
    return model


def _solve(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    mip = importlib.import_module("mip")
    bounds_and_costs, kinds = request["columns"]
    for lower, upper, cost, kind in zip(
        bounds_and_costs[::3], bounds_and_costs[1::3], bounds_and_costs[2::3], kinds, strict=True
    ):
        model.add_var(lb=lower, ub=upper, obj=cost, var_type=kind)
    variables = list(model.vars)
    ends, columns, factors, constants, senses = request["rows"]
    first = 0
    for end, constant, sense in zip(ends, constants, senses, strict=True):
        row = [variables[column] for column in columns[first:end]]
        model.add_constr(mip.LinExpr(row, factors[first:end], constant, sense))
        first = end
    for column, upper in request["upper"].items():
        variables[column].ub = upper
    for column, kind in request["kinds"].items():
        variables[column].var_type = kind
    for row, value in request["right"].items():
        model.constrs[row].rhs = value
    if request["costs"] is not None:
        model.objective = mip.LinExpr(
            [variables[column] for column in request["costs"]], list(request["costs"].values())
        )
    if request["start"] is not None:
        model.start = [(variables[column], value) for column, value in request["start"]]
    for name, value in request["settings"].items():
        setattr(model, name, value)
    limits = {"max_nodes": request["nodes"]} if request["nodes"] is not None and not request["relax"] else {}
    seconds = min(request["seconds"], LONGEST_SECONDS)
    status = model.optimize(max_seconds=seconds, relax=request["relax"], **limits)
    values = [variable.x for variable in variables]
    return {
        "status": status.name,
        "value": model.objective_value,
        "bound": model.objective_bound,
        "solutions": model.num_solutions,
        "values": None if None in values else array("d", values),
    }


if __name__ == "__main__":
    main()
