"""Which code runs a call: captured by Dynamo for its shapes alone, or once with symbolic sizes for all sizes that vary.

What is recompiled again and again for the same shapes depends on a value that changes in every call: the functions that
read it, or else the whole step, are then no longer captured.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat._recent import Recent
from lightning_remat.capture import _torch as internals
from lightning_remat.capture._cut import CODES, Cut, UnitChangedError, calls_units, name_as
from lightning_remat.capture.packed._tracing import packed_sequences
from lightning_remat.capture.tracing._answers import answers_are_found
from lightning_remat.capture.tracing._buffers import buffers_are_known
from lightning_remat.capture.tracing._compiled import compiled_stays, is_compiled, name_of
from lightning_remat.capture.tracing._constants import constants_are_known
from lightning_remat.capture.tracing._data import apart, data_is_assigned
from lightning_remat.capture.tracing._early import Early
from lightning_remat.capture.tracing._hook_order import hooks_in_order
from lightning_remat.capture.tracing._masks import masks_as_in_eager_mode
from lightning_remat.capture.tracing._messages import messages_stay
from lightning_remat.capture.tracing._numpy import numpy_as_constants
from lightning_remat.capture.tracing._recorded_outputs import recording_is_installed
from lightning_remat.capture.tracing._rows import rows_are_found
from lightning_remat.runtime._call import Call, Shapes, alike_but_for_sizes, varying
from lightning_remat.runtime._graph import Graph
from lightning_remat.runtime._reasons import Reasons
from lightning_remat.runtime._recaptured import OFTEN, Recaptured

log = logging.getLogger(__name__)

STATIC_CAPTURES = 3
"""Sets of shapes, alike but for sizes, that are captured each on its own; the next one has symbolic sizes."""

MANY_CAPTURES = 16
"""Calls with captures after which a warning says that these take time."""

MOST_CAPTURES = 4
"""Captures for the same shapes, at most, before the step is taken to depend on a value that changes in every call."""

MOST_OF_KNOWN = 2
"""The same for a float that is asked for before the step, of which each capture makes a constant (a batch norm's momentum)."""

MOST_OF_CALLED = 2
"""The same once only what the step calls is captured, where that is a single graph: it reads the value then."""

CALLS_OF_ONE = 25
"""Calls after which one of these captures no longer counts: what changes with each epoch may be captured anew each time."""

FOR_NOTHING = 4
"""Captures after which a function without gradients is no longer captured, if nearly each call has captured it."""

VARIES = STATIC_CAPTURES + 2
"""Captures after which a function is no longer captured, but what it calls is, if each call has."""

MOSTLY = 0.9
"""Share of the bytes of a graph's tensors that have the same shapes in another capture from which on little in it varies."""

LITTLE = 0.05
"""Share of the bytes that a call saves for its backward up to which a function may be left alone since its sizes vary."""

MOST_LEFT = 4
"""How often functions that are captured again and again may be left alone while the rest of the step stays planned."""

Backend = Callable[
    [torch.fx.GraphModule, Sequence[Any], bool, types.CodeType | None, Callable[[], None]], Callable[..., Any]
]
"""Takes a module from Dynamo, its inputs, whether sizes are symbolic, the frame's code, and what has the frame traced once more
with Python's numbers as constants, if it has any left; returns what runs it."""


class Captures:
    """Captures a function for the shapes that it is called with, and gives up on what is captured again and again.

    Args:
        function: the function that is captured.
        backend: called with each graph that Dynamo captures.
        call: the present call.
        reasons: told why something is not captured.
        dynamic_sources: gives patterns of Dynamo source names, separated by commas, of values that may change without a
            new capture (``"L['batch_idx']"``).

    Attributes:
        early: tensors that are computed before the function runs, and given to it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: Backend,
        call: Call,
        reasons: Reasons,
        dynamic_sources: Callable[[], str],
    ) -> None:
        self._packing = True
        self._passed_in = 0  # the call after which only what some function calls is captured; 0 before
        self._uncaptured = internals.Uncaptured()
        self._units = internals.UnitCalls(lambda: len(call.ran))
        self._runs: list[Callable[..., Any]] = []  # the graphs that were captured
        self._cuts: list[Callable[[], Callable[..., Any]]] = []
        self._made: dict[int, Callable[..., Any]] = {}  # of these
        self._pieces: dict[types.CodeType, Sequence[torch.fx.Node]] = {}
        self.early = Early(function, self._found_early)
        self._code: types.CodeType | None = None  # of the frame that is being captured
        left = getattr(function, internals.DISABLED, False)  # by the user
        codes = () if left else (*self.early.codes, *internals.codes_of_torch())
        for code in codes:  # it may have been skipped for another object of this class
            internals.skip_no_more(code)
        self._function, self._backend = function, backend
        self._call, self._reasons = call, reasons
        self._dynamic_sources = dynamic_sources
        self._numbers = internals.VaryingNumbers()
        self._guards = internals.ModuleGuards()
        self._compiled: dict[int, Any] = {}  # by id, what the user has compiled, as met while tracing
        self._told_compiled = False
        self._static_shapes: Recent[Shapes, None] = Recent()
        self._captures: Recent[Shapes, tuple[int, int]] = Recent()  # how many count, and which call was the last one
        self._calls: Recent[Shapes, int] = Recent()
        self._all_calls = 0
        self._captured_sets = 0
        self._left_codes: set[types.CodeType] = set()  # of frames that are not captured any more
        self._passed_codes: set[types.CodeType] = set()  # likewise, but what they call is
        self._passed_for_nothing = False
        self._times_left = 0
        self._recaptured = Recaptured()
        self._static: Callable[..., Any]
        self._symbolic: Callable[..., Any] | None
        self._compile(symbolic=True)
        if is_compiled(function):
            reasons.give_up(
                "it was compiled with torch.compile as a whole, and your compiler runs it; give the plain function or module "
                "to have it planned"
            )

    def _compile(self, symbolic: bool) -> None:
        self._backends: dict[bool, Callable[..., Any]] = {}
        self._static = self._compiled_with(symbolic=False)
        self._symbolic = self._compiled_with(symbolic=True) if symbolic else None

    def _compiled_with(self, symbolic: bool) -> Callable[..., Any]:
        # A backend of its own for each: Dynamo shares what it captured for equal backends, as bound methods would be.
        weakly = weakref.ref(self)  # Dynamo keeps it, whoever is gone
        self._backends[symbolic] = lambda module, inputs: weakly()._hand_over(module, inputs, symbolic)  # type: ignore[union-attr]
        return self._compiled_for(self._function, symbolic)

    def _compiled_for(self, function: Callable[..., Any], symbolic: bool) -> Callable[..., Any]:
        backend, around = self._backends[symbolic], functools.partial(self._tracing, symbolic=symbolic)
        waits = self._units.waits
        return internals.compile_frame(
            function, backend, around, self._left_codes, CODES, waits, symbolic, self._uncaptured, self._passed_codes
        )

    def _hand_over(self, module: torch.fx.GraphModule, inputs: Sequence[Any], symbolic: bool) -> Callable[..., Any]:
        self._know_sizes(module)
        self._units.note(self._code, module)
        weakly = weakref.ref(self)  # here too
        if calls_units(module):
            number = len(self._cuts)
            self._cuts.append(lambda: self._compiled_for(Cut(module, self._pieces).run, symbolic))
            return apart(module, lambda *values: weakly()._run_cut(number, values))  # type: ignore[union-attr]
        if self._code in self._pieces:
            name_as(self._pieces[self._code], module)
        number = len(self._runs)
        self._runs.append(
            self._backend(module, inputs, symbolic, self._code, functools.partial(self._with_constants, module))
        )
        return apart(module, lambda *values: weakly()._runs[number](*values))  # type: ignore[union-attr]

    def _know_sizes(self, module: torch.fx.GraphModule) -> None:
        """Have no size in a graph follow from a number of Python's, since a plan knows all sizes."""
        integers = internals.integers(module, sizes=True)
        if self.early.are_sizes(integers):
            internals.trace_again()
        if internals.know_sizes(module):
            return
        self._known(integers)
        if internals.sizes_from_floats(module):
            internals.floats_as_constants(module)

    def _known(self, integers: Sequence[str]) -> None:
        """Have the frame traced once more, with these integers as constants, if any of them is none."""
        if self._numbers.are_sizes(self._code, integers) or self.early.are_sizes(integers):
            internals.trace_again()

    def _with_constants(self, module: torch.fx.GraphModule) -> None:
        """Have the frame traced once more, with Python's numbers as constants, if it has any left."""
        self._known(internals.integers(module, sizes=False))
        if self.early.leave_floats(internals.floats(module)):
            internals.trace_again()
        internals.floats_as_constants(module)

    def _run_cut(self, number: int, inputs: Sequence[Any]) -> Any:
        """Run a graph that calls units, the one of this number, in parts.

        Raises:
            UnitChangedError: where a unit returns something else than was expected; its calls are part of no graph from now on.
        """
        if number not in self._made:
            self._made[number] = self._cuts[number]()
        try:
            return self._made[number](*inputs)
        except UnitChangedError as error:
            self._units.never(error.unit)
            self.anew()
            raise

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a call: compute what it asks of its arguments; what has had too many answers is left to Dynamo from now on."""
        self.early.begin(args, kwargs)
        if self.early.leave_what_varies():
            self.anew()

    def anew(self) -> None:
        """Capture everything again from the next call on."""
        self._compile(symbolic=self._symbolic is not None)

    def chosen(
        self, leaves: Sequence[torch.Tensor]
    ) -> tuple[Callable[..., Any], bool, list[tuple[torch.Tensor, tuple[int, ...]]]]:
        """What runs the present call, whether with symbolic sizes, and the tensors and dimensions of these."""
        shapes = self._call.shapes
        self._call.number = self._calls[shapes] = (self._calls.get(shapes) or 0) + 1
        self._all_calls += 1
        if shapes in self._static_shapes or self._symbolic is None:
            self._static_shapes[shapes] = None
            return self._static, False, []
        alike = [known for known in self._static_shapes if alike_but_for_sizes(known, shapes)]
        if len(alike) < STATIC_CAPTURES:
            self._static_shapes[shapes] = None
            return self._static, False, []
        return self._symbolic, True, list(zip(leaves, varying(shapes, alike), strict=True))

    @property
    def waits(self) -> bool:
        """Whether something in the last call is no longer captured, so that the next call takes another path."""
        return self._units.waited or 0 < self._all_calls == self._passed_in

    @property
    def passes(self) -> bool:
        """Whether all that was captured changed with each call, so that only what it calls is captured now."""
        return self._passed_in > 0

    def called(self) -> None:
        """A call is over."""
        self._units.forget_hooks()
        if self._uncaptured.returned() and not self._call.ran:
            self._reasons.failed(
                "for some shapes nothing could be captured, though it was for others: with those it runs as before, and what "
                "it holds then is outside of the plans; TORCH_LOGS=graph_breaks says more"
            )

    def raised(self) -> None:
        """A call has raised an error."""
        self._uncaptured.raised()
        self._uncaptured.returned()
        self._uncaptured.left_alone = self.passes

    def known_static(self, shapes: Shapes) -> None:
        """Calls of these shapes are captured on their own."""
        self._static_shapes[shapes] = None

    def without_symbols(self, reason: str) -> None:
        """Capture each set of shapes on its own from now on."""
        self._symbolic = None
        name = self._reasons.name or "the step"
        log.info("%s is captured for each set of shapes on its own: with symbolic sizes, %s", name, reason)
        early = len(self.early.tensors)
        given = {shapes[: len(shapes) - early] for shapes in self._static_shapes}
        if len(given) < len(self._static_shapes) and self.early.leave_sizes():
            self.anew()  # for batches of the same shapes it would be captured for each number of rows

    def without_packing(self, reason: str) -> None:
        """Leave packed sequences alone from now on: they run as before, between the parts that are planned."""
        self._packing = False
        self.anew()
        log.info("%s runs its packed sequences as before: %s", self._reasons.name or "the step", reason)

    def _found_early(self, tensor: torch.Tensor) -> None:
        """Called during a capture with a tensor that is computed before the step, and is an input from now on."""
        self._call.batch |= {id(tensor)}

    @contextlib.contextmanager
    def _tracing(self, code: types.CodeType, symbolic: bool) -> Iterator[None]:
        """Open while Dynamo captures a frame of the function, and its graphs are planned."""
        around, self._code = self._code, code
        with (
            internals.tracing(self._dynamic_sources(), self._numbers),
            self._guards.grouped(),
            masks_as_in_eager_mode(self.early),
            buffers_are_known(),
            data_is_assigned(),
            hooks_in_order(),
            numpy_as_constants(),
            constants_are_known(),
            messages_stay(),
            recording_is_installed(),
            rows_are_found(self.early),
            answers_are_found(self.early),
            packed_sequences(self.early) if self._packing else contextlib.nullcontext(),
            compiled_stays(lambda called: self._compiled.update({id(called): called})),
            internals.alike_modules(),
            self._units.as_nodes(symbolic),
        ):
            try:
                yield
            finally:
                self._code = around
            self._recaptured.note(code, self._all_calls)

    # -- what is not captured -----------------------------------------------------------------------------------------

    def turned_off(self) -> bool:
        """Whether the user lets Dynamo capture nothing at present; warns of it once."""
        by = internals.turned_off()
        if by:
            self._reasons.failed(f"torch captures nothing at present: {by} turns that off")
        return bool(by)

    def tell_compiled(self) -> None:
        """Warn once of what the step calls that was compiled with ``torch.compile``: it is not planned."""
        if not self._compiled or self._told_compiled:
            return
        self._told_compiled = True
        names = list(dict.fromkeys(map(name_of, self._compiled.values())))
        verb, stay = ("was", "stays") if len(names) == 1 else ("were", "stay")
        rest = "the rest is planned in parts" if self._call.ran else "and nothing around it can be planned"
        self._reasons.failed(
            f"{' and '.join(names)} {verb} compiled with torch.compile and {stay} so: your compiler runs it, what it holds for "
            f"the backward is outside of the plan and the budget, {rest}. To have the whole step planned, compile nothing "
            "inside of it"
        )

    def unread(self, graphs: Iterable[Graph], module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        """The parameters of a module, by name, that no captured graph and no compiled module reads."""
        known = {key for graph in graphs for key in (*graph.weights, *graph.read)}
        known |= {
            id(p) for one in self._compiled.values() if isinstance(one, torch.nn.Module) for p in one.parameters()
        }
        known |= {id(shard.parameter) for shard in internals.shards_of([module]) if id(shard.whole) in known}
        return {name: p for name, p in module.named_parameters() if id(p) not in known}

    def again(self, shapes: Shapes) -> str:
        """Count a call of these shapes that has captured something; if it is once too often, returns why it does so."""
        self._captured_sets += shapes not in self._captures
        if shapes not in self._captures and self._captured_sets == MANY_CAPTURES:
            log.warning(
                "%s was captured for %d different sets of shapes, which takes time: pad batches to fewer sizes if you can",
                self._reasons.name or "the step",
                MANY_CAPTURES,
            )
        counted, last = self._captures.get(shapes) or (0, 0)
        captures = max(0, counted - (self._all_calls - last) // CALLS_OF_ONE) + 1
        if captures > MOST_OF_KNOWN and self._leave_known_floats():
            captures = MOST_CAPTURES - 1  # what reads them is captured in parts now, and soon left if it varies still
        self._captures[shapes] = captures, self._all_calls
        if captures <= (MOST_OF_CALLED if self.passes and len(self._call.path) == 1 else MOST_CAPTURES):
            return ""
        condition = internals.recapture_reason(self._call.began)
        words = f"this did not hold at last: {condition}" if condition else "such as a Python number"
        return (
            f"was captured {captures} times for the same shapes, because it depends on a value that changes from call "
            f"to call ({words})"
        )

    def _leave_known_floats(self) -> bool:
        """Ask no more before the step for floats of which this capture has made constants; returns whether it has."""
        condition = internals.recapture_reason(self._call.began) or ""
        left = self.early.leave_floats(re.findall(r"early_\d+", condition))
        if left:
            self.early.leave_floats(None)  # as a rule there is one in each layer
            self.anew()
        return left

    def ask_no_more(self, shapes: Shapes) -> bool:
        """Ask nothing of the values of a batch before the step, since this led to too many captures; returns whether it did."""
        if not self.early.leave():
            return False
        self._captures[shapes] = 0, self._all_calls
        self.anew()
        return True

    def leave_what_changes(
        self, shapes: Shapes, graphs: Sequence[Graph], new: Sequence[Graph], again: str
    ) -> set[Graph]:
        """No longer capture the functions that were captured again in this call.

        Where they are all that is planned, or the step itself, what they call is captured from now on, in parts.

        Args:
            shapes: the `Shapes` of the call.
            graphs: all captured graphs.
            new: the graphs that were captured in this call.
            again: says in words that they were captured again and again.

        Returns:
            The graphs that do not run any more, or in eager mode; none, where nothing could stay planned.
        """
        codes = {graph.code for graph in new if graph.code is not None}
        if not codes or self._times_left == MOST_LEFT:
            return set()
        self._times_left += 1
        self._captures[shapes] = 0, self._all_calls
        number = self._calls.get(shapes) or 0
        left = {graph for graph in graphs if graph.code in codes and not graph.always_called(number)}
        own = {code for code in codes if internals.is_part_of(code, self._function)}
        if own or left.issuperset(self._call.path):
            left = set(graphs)
            code = internals.code_of(self._function)
            tell = log.info if self.passes else self._reasons.failed
            tell(
                f"it {again}; what it calls is planned in parts from now on: to have the whole step planned, pass such a value "
                "as a tensor, or read it outside"
            )
            self._pass(codes if not own or code is None else {code})
        elif any(graph.plainly is None for graph in left):
            return set()
        else:
            self._left_codes |= codes
            self._reasons.failed(f"{_names(codes)} {again}; what else the step does stays planned")
        for graph in left:
            graph.left = True
        return left

    def _pass(self, codes: set[types.CodeType]) -> None:
        """Capture what these functions call, torch's own modules too, but no longer the functions."""
        self._passed_codes |= codes
        self._passed_in = self._all_calls
        self._uncaptured.capture_what_is_called()
        self.anew()

    def leave_what_varies(self, graphs: Sequence[Graph]) -> set[Graph]:
        """No longer capture the functions that nearly every call captures anew, since sizes in them vary that are no symbols.

        Only functions whose graphs save little of what the call does are left, since nothing of theirs is planned then; those
        without gradients, of which nothing is planned anyway, soon. Where little varies in what saves more (a network, and the
        first ops on the targets), what it calls is captured in its place.

        Args:
            graphs: all captured graphs.

        Returns:
            The graphs that run in eager mode from now on.
        """
        planned = {graph.code for graph in graphs}
        # What goes on after a graph break in a function is planned: so the function is captured too.
        begun = {internals.begun_by(code) for code in planned if code is not None}
        times = FOR_NOTHING // 2 if self._passed_for_nothing else FOR_NOTHING  # what one calls varies with it
        for nothing in self._recaptured.often(self._all_calls, times) - planned:
            if internals.begun_by(nothing) not in begun and not internals.is_code_of(nothing, self._function):
                self._passed_codes.add(nothing)  # as transforms of the batch
                self._passed_for_nothing = True
        known = planned - self._left_codes - self._passed_codes
        if large := {
            code
            for code in self._recaptured.often(self._all_calls, VARIES) & known
            if self._varies_little(code, graphs)
        }:
            self._reasons.failed(
                f"{_names(large)} was captured in {VARIES} calls or more, since sizes of little in it change with each (the "
                "targets of a detector, say); what it calls is planned in parts from now on: to have it planned whole, pad "
                "these to one size"
            )
            self._pass(large)
            for graph in graphs:
                graph.left = True
            return set(graphs)
        codes = self._recaptured.often(self._all_calls, OFTEN) & known
        if not codes:
            return set()
        saved = Counter[types.CodeType | None]()
        for graph in self._call.path:
            saved[graph.code] += graph.saved_bytes()
        small = LITTLE * saved.total()
        cannot = {graph.code for graph in graphs if graph.plainly is None}
        codes = {
            code for code in codes if saved[code] <= small and not internals.is_code_of(code, self._function)
        } - cannot
        left = {graph for graph in graphs if graph.code in codes}
        self._passed_codes |= codes
        for graph in left:
            graph.left = True
        if left:
            names = _names(codes & {graph.code for graph in left})
            self._reasons.failed(
                f"{names} was captured in {OFTEN} calls or more, since sizes in it change with each (the number of boxes that "
                "were found, say); what else the step does stays planned"
            )
        return left

    def _varies_little(self, code: types.CodeType | None, graphs: Sequence[Graph]) -> bool:
        """Whether a function, in a call of new shapes, mostly computes tensors of submodules that it has computed before."""
        own = [graph for graph in self._call.path if graph.code is code]
        earlier = [graph for graph in graphs if graph.code is code and graph not in own]
        if self._call.number > 1 or not own or not earlier or any(graph.symbolic for graph in (*own, *earlier)):
            return False
        now, before = (_computed(graph) for graph in (own[-1], earlier[-1]))
        common = sum(nbytes for (module, *_), nbytes in (now & before).items() if module)
        return common >= MOSTLY * sum(now.values()) > 0


def _computed(graph: Graph) -> Counter[tuple[str, tuple[int, ...], str]]:
    """Bytes of what a graph computes, by submodule ("" for none), shape and dtype."""
    found = Counter[tuple[str, tuple[int, ...], str]]()
    computed = graph.captured.graph
    for op in computed.ops:
        for tensor in map(computed.tensors.__getitem__, op.outputs):
            found[op.module, tuple(tensor.shape), str(tensor.dtype)] += computed.storages[tensor.storage]
    return found


def _names(codes: Iterable[types.CodeType]) -> str:
    return " and ".join(sorted(f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})" for code in codes))
