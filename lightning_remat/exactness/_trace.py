"""Finding the first operation with other bits than eager mode: runs are recorded op by op, as hashes of tensors.

All values of the eager run are known by their hashes. Capture decomposes some ops, joins others and leaves some out, so
that the two runs cannot be compared line by line. Instead, from a result that differs the search goes back, op by op,
through values that eager mode never had, to an op whose inputs eager mode had too. There the runs diverge: either the
op's kernel returns other bits for the same inputs, or eager mode computes the result in another form.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch.nn.modules import module as global_hooks

from lightning_remat.capture import _torch as internals
from lightning_remat.exactness._bits import digest

NO_VALUES = ("empty", "new_empty", "resize")
"""Prefixes of the names of ops that return uninitialized memory."""

WRITTEN = ("out", "out0", "out1", "out2", "grad_input")
"""Names of arguments that an op writes and does not read."""


class Cause(str, Enum):
    """Why an op returns other bits; ``sentence`` says it in words."""

    KERNEL = "kernel"
    FORM = "form"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    Cause.KERNEL: "given the same bits, it returned others",
    Cause.FORM: "given bits that eager mode has too, it returned others: there they are computed in another form",
}


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """The first operation whose result has other bits.

    Attributes:
        op: its name, such as ``"aten.mm.default"``.
        module: the path of the module that it belongs to ("" for the step's own code, and where it is not known).
        backward: whether it runs in the backward.
        cause: why it returns other bits.
    """

    op: str
    module: str
    backward: bool
    cause: Cause

    def __str__(self) -> str:
        where = f"in {self.module}" if self.module else "in no module"
        return f"{self.op} {where}, in the {'backward' if self.backward else 'forward'}: {self.cause.sentence}"


@dataclasses.dataclass(frozen=True)
class _Call:
    op: str
    module: str
    backward: bool
    settings: str
    moves: bool  # its result is a view or a copy of what it reads
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def question(self) -> tuple[Any, ...]:
        return self.op, self.settings, self.inputs


class Record:
    """The ops of one run, recorded with digests of what they read and write."""

    def __init__(self) -> None:
        self._digests: list[torch.Tensor] = []
        self._calls: list[_Call] = []  # inputs and outputs as indices into the digests
        self._results = range(0)

    def call(self, op: str, module: str, args: Any, kwargs: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Run an op, and record it; returns its result."""
        written = _tensors([value for name, value in kwargs.items() if name in WRITTEN])
        read = _tensors((args, [value for name, value in kwargs.items() if name not in WRITTEN]))
        inputs = self._note(read)
        versions = [0 if one.is_inference() else one._version for one in read]
        result = run()
        name = op.partition(".")[2]
        if name.startswith(NO_VALUES):
            return result
        changed = [one for one, v in zip(read, versions, strict=True) if not one.is_inference() and one._version != v]
        returned = _tensors(result)
        moves = name.startswith("clone") or (bool(returned) and not _in_place(name) and _lie_on(returned, read))
        outputs = self._note([*returned, *written, *changed])
        settings = _settings(args, kwargs)
        moves = moves and not changed
        self._calls.append(_Call(op, module, internals.in_backward(), settings, moves, tuple(inputs), tuple(outputs)))
        return result

    def end(self, results: Iterable[torch.Tensor]) -> None:
        """End the record of a run, which has these results."""
        self._results = self._note(results)

    def _note(self, tensors: Iterable[torch.Tensor]) -> range:
        start = len(self._digests)
        self._digests += [digest(tensor) for tensor in tensors]
        return range(start, len(self._digests))

    def read(self) -> tuple[list[_Call], list[int]]:
        """All calls, with digests as numbers, and the digests of the results."""
        found = [0] * len(self._digests)
        places: defaultdict[torch.device, list[int]] = defaultdict(list)
        for place, value in enumerate(self._digests):
            places[value.device].append(place)
        for some in places.values():
            for place, value in zip(some, torch.stack([self._digests[i] for i in some]).tolist(), strict=True):
                found[place] = value
        calls = [
            dataclasses.replace(
                call, inputs=tuple(found[i] for i in call.inputs), outputs=tuple(found[i] for i in call.outputs)
            )
            for call in self._calls
        ]
        return calls, [found[i] for i in self._results]


@contextmanager
def eager_recorded(record: Record, modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """While open, record the ops of eager mode, each with the path of its module (``modules``: by path prefix)."""
    paths = {part: path for prefix, module in modules.items() for path, part in module.named_modules(prefix=prefix)}
    at_work: list[torch.nn.Module] = []
    made_by: dict[int, str] = {}

    def enters(module: torch.nn.Module, _args: Any) -> None:
        at_work.append(module)

    def leaves(module: torch.nn.Module, _args: Any, _output: Any) -> None:
        while at_work and at_work.pop() is not module:
            pass

    def observe(op: Any, args: Any, kwargs: Mapping[str, Any], node: int, run: Callable[[], Any]) -> Any:
        if internals.in_backward():
            return record.call(str(op), made_by.get(node, ""), args, kwargs, run)
        path = next((paths[one] for one in reversed(at_work) if one in paths), "")
        made_by.setdefault(node, path)
        return record.call(str(op), path, args, kwargs, run)

    before = global_hooks.register_module_forward_pre_hook(enters)
    after = global_hooks.register_module_forward_hook(leaves, always_call=True)
    try:
        with internals.observed_ops(observe):
            yield
    finally:
        before.remove()
        after.remove()


def first_difference(reference: Record, run: Record) -> FirstDifference | None:
    """The first op of ``run`` that diverges from ``reference``; ``None`` where none does, or it is not known."""
    before, known_results = reference.read()
    calls, results = run.read()
    known = set(known_results)
    answers: defaultdict[tuple[Any, ...], set[tuple[int, ...]]] = defaultdict(set)
    for call in before:
        known.update(call.inputs, call.outputs)
        answers[call.question].add(call.outputs)
    if set(results) <= known:
        return None
    for call in calls:
        if call.moves and set(call.inputs) <= known:
            known.update(call.outputs)
    roots = [i for i in _roots(calls, results, known) if set(calls[i].inputs) <= known]
    if not roots:  # results were added up by autograd, outside of what was captured
        roots = [i for i, one in enumerate(calls) if set(one.inputs) <= known and not set(one.outputs) <= known]
    if not roots:
        return None
    kernels = [i for i in roots if calls[i].question in answers]
    found = calls[min(kernels or roots)]
    return FirstDifference(found.op, found.module, found.backward, Cause.KERNEL if kernels else Cause.FORM)


def _roots(calls: Sequence[_Call], results: Iterable[int], known: set[int]) -> set[int]:
    """The ops that unknown results were computed by, back to those whose inputs are known."""
    makers: dict[int, int] = {}
    for i, call in enumerate(calls):
        for value in call.outputs:
            makers.setdefault(value, i)
    found: set[int] = set()
    waiting = [makers[value] for value in results if value not in known and value in makers]
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            waiting += [makers[value] for value in calls[i].inputs if value not in known and value in makers]
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return list(itertools.chain.from_iterable(map(_tensors, value)))
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    return []


def _in_place(name: str) -> bool:
    return name.partition(".")[0].endswith("_")


def _lie_on(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether each of the tensors shares the memory of one of the others."""
    places = {one.untyped_storage().data_ptr() for one in others if one.layout is torch.strided}
    return all(one.layout is torch.strided and one.untyped_storage().data_ptr() in places for one in tensors)


def _settings(args: Any, kwargs: Mapping[str, Any]) -> str:
    """All arguments but tensors, as text."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return "tensor"
        if isinstance(value, (tuple, list)):
            return [plain(one) for one in value]
        return value

    return repr((plain(args), sorted((name, plain(value)) for name, value in kwargs.items())))
