"""Calls of modules that Dynamo traces once, and that are copied where a module is called that is alike.

A deep network calls many modules that are alike, and Dynamo goes through the Python of each, instruction by instruction. What
it makes of a call depends on what it reads meanwhile (see `_reads`), on the arguments, and on what surrounds the call.
Where all of that is alike, the nodes of the first call are copied for the next, with the module's own parameters, and the
guards are installed that the module would have got. A call that writes to anything but tensors, that asks for a tensor's value,
or in which anything is not understood is traced as ever.

* ``UnspecializedNNModuleVariable.call_function``: what is called for each module.
* ``VariableBuilder.__call__``, ``LazyVariableTracker.create``, ``LazyConstantVariable.create``: by which values are read.
* ``GuardsSet.add``: by which they are guarded on.
* ``SideEffects.mutation``, ``SideEffects.store_attr``: by which things are written to.
* ``TensorVariable.set_name_hint``: by which nodes are named as variables are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx
import torch.fx.traceback as fx_traceback
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import lazy
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import Guard, GuardsSet, TracingContext
from torch._ops import HigherOrderOperator

from lightning_remat._replaced import replaced
from lightning_remat.capture._torch._guards import values_asked
from lightning_remat.capture._torch.alike._copies import Call, Copy, path, realized
from lightning_remat.capture._torch.alike._reads import (
    Places,
    Read,
    UnlikeError,
    check_of,
    is_as_it_was,
    is_keyed_by_objects,
    lies,
    or_unlike,
)
from lightning_remat.capture._torch.alike._trace import Trace

Node = torch.fx.Node

_CANDIDATES = 4
"""The most calls, of those that look alike from outside, with which a call is compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Moment:
    """What there is at some time.

    Attributes:
        last: the last node.
        events: the number of events.
        names: of modules that were called.
        calls: of modules.
        state: what no call may change that is copied.
    """

    last: Node | None
    events: int
    names: int
    calls: int
    state: tuple[Any, ...]


class Calls(Trace):
    """The calls of modules in one graph that Dynamo makes. See `Trace`."""

    def __init__(self, output: Any, off: bool = False) -> None:
        super().__init__(output, off)
        self._known: dict[Any, list[Call]] = {}

    def call(
        self, trace: Callable[[], Any], variable: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """What a call of a module becomes.

        Args:
            trace: traces it.
            variable: of the module.
            tx: what translates.
            args: the arguments' variables.
            kwargs: likewise, by name.

        Raises:
            RestartAnalysis: where a copy has failed: Dynamo begins again, and each call is traced.
        """
        if self.off:
            return trace()
        every, names, given = [*args, *kwargs.values()], tuple(kwargs), list[Any]()
        try:
            key = self._key(variable, tx, every, names, given)
            before, lay = self._moment(tx), _lie(given)
        except UnlikeError:
            return trace()
        for known in self._known.get(key, ())[-_CANDIDATES:]:
            try:
                copy = Copy(self, known, variable, tx, given)
            except UnlikeError:
                continue
            return copy.made()
        result = trace()
        with contextlib.suppress(UnlikeError):
            if _lie(given) != lay:  # the variables of a copy's arguments would not know
                raise UnlikeError
            self._known.setdefault(key, []).append(self._traced(before, variable, tx, every, given, result))
        return result

    @or_unlike
    def _key(self, variable: Any, tx: Any, args: Sequence[Any], names: tuple[str, ...], given: list[Any]) -> Any:
        """All that a call depends on, but for what is read; the variables of tensors are added to ``given``.

        Raises:
            UnlikeError: where that is not known.
        """
        output = self.output
        if self.writes.lost or output.current_tracer.parent is not None or variable.source is None:
            raise UnlikeError
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UnlikeError
        frames, frame = [], tx
        while frame is not None:
            frames.append((frame.f_code, frame.lineno, frame.current_instruction.positions))
            frame = getattr(frame, "parent", None)
        devices = ("cpu", "cuda")
        ambient = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.is_autocast_cache_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            repr(fx_traceback.get_current_meta().get("custom")),
            *((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices),
            *map(id, getattr(tx, "active_generic_context_managers", ())),
            *map(id, getattr(tx.symbolic_torch_function_state, "mode_stack", ())),
        )
        kinds = tuple(_kind(one, given, output.side_effects) for one in args)
        return type(variable), variable.value_type, names, kinds, tuple(frames), ambient

    @or_unlike
    def _moment(self, tx: Any) -> _Moment:
        output, effects = self.output, self.output.side_effects
        state = (
            self.writes.number,
            values_asked(),
            output.current_tracer,
            len(output.nn_modules),
            len(output.random_calls),
            len(effects.tensor_hooks),
            len(effects.save_for_backward),
            len(output.installed_globals),
        )
        last = next(iter(reversed(output.graph.nodes)), None)
        return _Moment(last, len(self.events), len(tx.num_calls), sum(tx.num_calls.values()), state)

    @or_unlike
    def _traced(self, before: _Moment, variable: Any, tx: Any, args: list[Any], given: list[Any], result: Any) -> Call:
        """A call that was traced since, for others to be copied from.

        Raises:
            UnlikeError: where not all of it is understood.
        """
        now = self._moment(tx)
        if before.state != now.state or now.calls - before.calls != now.names - before.names:
            raise UnlikeError
        nodes: list[Node] = []
        for node in itertools.takewhile(lambda one: one is not before.last, reversed(self.output.graph.nodes)):
            if not _is_plain(node):
                raise UnlikeError
            nodes.append(node)
        nodes.reverse()
        places = Places(self.output, variable.source, variable.value)
        events, same = self._events(places, before.events)
        known = {*nodes, *(one.as_proxy().node for one in given)}
        known |= {one.node for _, one in events if isinstance(one, Read) and one.node is not None}
        returned = {one.as_proxy().node: one._is_name_set for one in _tensors([result])}
        for one in itertools.chain((part for node in nodes for part in node.all_input_nodes), returned):
            if one not in known:  # read before the call
                read = _given(one)
                events.append((places.position(read.source), read))
                known.add(one)
        reads = (one for _, one in events if isinstance(one, Read) and one.node is not None)
        if not all(one.node is not None and is_as_it_was(one.node, one.value) for one in reads):
            raise UnlikeError
        return Call(
            module=variable.value,
            name=path(variable),
            around=len(tx.nn_module_stack),
            args=args,
            given=given,
            result=realized(result),
            returned=returned,
            nodes=[(node, self.named.get(node, "")) for node in nodes],
            events=events,
            places=places,
            same=same,
            names=list(itertools.islice(tx.num_calls, before.names, None)),
            writes=self.writes.number,
            anew=any(map(_writes, nodes)) or any(map(_lies_on_another, returned)),
        )

    def _events(self, places: Places, since: int) -> tuple[list[tuple[int | None, Read | Guard]], list[Any]]:
        """What was read and guarded on since, once, with its place; and what modules could share, elsewhere.

        Raises:
            UnlikeError: for what is not understood.
        """
        found: dict[Any, tuple[int | None, Read | Guard]] = {}
        same: dict[int, Any] = {}
        guards = TracingContext.get().guards_context.dynamo_guards.inner
        for event in self.events[since:]:
            if isinstance(event, Read):
                key: Any = (event.source, None)
                if key in found:
                    continue
                place, value = places.position(event.source), event.value
                if (isinstance(value, torch.Tensor) and event.node is None) or is_keyed_by_objects(value):
                    raise UnlikeError
                if place is None and isinstance(value, (torch.nn.Module, torch.Tensor, list, dict, set)):
                    same[id(value)] = value
            else:
                place, check = places.position(event.originating_source), None
                if event not in guards or (place is not None and places.is_of_class(place)):
                    continue  # it was taken back, or is there already
                if place is None and places.are_named(event):
                    raise UnlikeError  # something elsewhere is one with something in the module
                if place is not None:
                    function, args, kwargs = check_of(event)
                    check = (function, args, tuple(kwargs.items()))
                key = (event.originating_source, check or event.create_fn)
            found.setdefault(key, (place, event))
        return list(found.values()), list(same.values())


def _kind(variable: Any, given: list[Any], effects: Any) -> Any:
    """All that tells one argument from another, but for where a tensor was computed; such tensors are added to ``given``.

    Raises:
        UnlikeError: for what may be otherwise than when it was seen before.
    """
    variable = realized(variable)
    kind = type(variable)
    if kind is TensorVariable and variable.source is None:
        node = variable.as_proxy().node
        places = [one.as_proxy().node for one in given]
        given.append(variable)
        if variable in effects.store_attr_mutations:
            raise UnlikeError
        example = node.meta["example_value"]
        same = places.index(node) if node in places else len(places)
        return same, variable.class_type, example.grad_fn is None, *lies(example)
    if kind is ConstantVariable:
        return type(variable.value), repr(variable.value)
    if kind is TupleVariable:
        return tuple(_kind(part, given, effects) for part in variable.items)
    if variable.source is None:
        raise UnlikeError
    return kind, id(variable)


@or_unlike
def _lie(given: Sequence[Any]) -> list[Any]:
    """How tensors lie, however often they were written to."""
    return [lies(one.as_proxy().node.meta["example_value"], written=False) for one in given]


def _tensors(variables: Sequence[Any]) -> Iterator[Any]:
    """The variables of tensors among some, and in tuples among them.

    Raises:
        UnlikeError: for what is neither tensor nor constant.
    """
    for variable in map(realized, variables):
        kind = type(variable)
        if kind is TensorVariable:
            yield variable
        elif kind is TupleVariable:
            yield from _tensors(variable.items)
        elif kind is not ConstantVariable:
            raise UnlikeError


def _given(node: Node) -> Read:
    """The read of a tensor that the graph is given.

    Raises:
        UnlikeError: for a node that is something else.
    """
    argument = node.meta.get("grapharg") if node.op == "placeholder" else None
    if argument is None or argument.source is None or not isinstance(argument.example, torch.Tensor):
        raise UnlikeError
    return Read(argument.source, argument.example, node)


def _is_plain(node: Node) -> bool:
    """Whether a node is a call of an op on tensors whose sizes are numbers."""
    return (
        node.op in ("call_function", "call_method")
        and not isinstance(node.target, HigherOrderOperator)
        and {"example_value", "source_fn_stack"} <= node.meta.keys()
        and "unbacked_bindings" not in node.meta
        and "out" not in node.kwargs
        and all(one.op != "get_attr" for one in node.all_input_nodes)
    )


def _lies_on_another(node: Node) -> bool:
    """Whether a result is no tensor of its own, or may be none."""
    return node.target is operator.getitem or bool(node.meta["example_value"]._is_view())


def _writes(node: Node) -> bool:
    """Whether an op writes to a tensor, by its name."""
    name = str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or node.kwargs.get("inplace") is True or (name[:1] == "i" and hasattr(operator, name))


class _Here(threading.local):
    """The calls of the graph that Dynamo makes in a thread."""

    calls: Calls | None = None


_HERE = _Here()


@contextlib.contextmanager
def alike_modules() -> Iterator[None]:
    """While Dynamo traces a frame: calls of modules that are alike are traced once."""
    before, _HERE.calls = _HERE.calls, None
    try:
        with replaced(_replacements()):
            yield
    finally:
        _HERE.calls = before


def _calls_of(output: Any) -> Calls:
    """What is noted of a graph: from its first call of a module on, or the first write that comes before."""
    if _HERE.calls is None or _HERE.calls.output is not output:  # Dynamo may have begun again
        _HERE.calls = Calls(output, _HERE.calls is not None and _HERE.calls.off)
    return _HERE.calls


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """Of the functions of torch's that are watched, the class, the name, and what is called in their place."""
    call, build = UnspecializedNNModuleVariable.call_function, VariableBuilder.__call__
    add, name_as = GuardsSet.add, TensorVariable.set_name_hint
    mutation, store = SideEffects.mutation, SideEffects.store_attr

    def called(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return _calls_of(tx.output).call(
            functools.partial(call, variable, tx, args, kwargs), variable, tx, args, kwargs
        )

    def built(builder: Any, value: Any) -> Any:
        if _HERE.calls is None:
            return build(builder, value)
        events, read = _HERE.calls.events, Read(builder.source, value)
        events.append(read)
        number = len(events)
        found = build(builder, value)
        if isinstance(value, torch.Tensor):
            del events[number:]  # it is built anew for a copy
            read.node = found.as_proxy().node if type(found) is TensorVariable else None
        return found

    def added(guards: Any, guard: Guard, **options: Any) -> None:
        if _HERE.calls is not None:
            _HERE.calls.events.append(guard)
        add(guards, guard, **options)

    def named(variable: Any, name: str) -> None:
        if _HERE.calls is not None and not variable._is_name_set:
            _HERE.calls.named[variable.as_proxy().node] = name
        name_as(variable, name)

    def written(effects: Any, variable: Any) -> None:
        if (output := effects.output_graph_weakref()) is not None:
            _calls_of(output).writes.note(variable)
        mutation(effects, variable)

    def stored(effects: Any, variable: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if (output := effects.output_graph_weakref()) is not None:
            _calls_of(output).writes.note(variable, value)
        store(effects, variable, name, value, *args, **kwargs)

    yield UnspecializedNNModuleVariable, "call_function", called
    yield VariableBuilder, "__call__", built
    yield GuardsSet, "add", added
    yield TensorVariable, "set_name_hint", named
    yield SideEffects, "mutation", written
    yield SideEffects, "store_attr", stored
    for kind in (lazy.LazyVariableTracker, getattr(lazy, "LazyConstantVariable", None)):
        if kind is not None:
            yield kind, "create", staticmethod(_noted(kind.create))


def _noted(create: Callable[..., Any]) -> Callable[..., Any]:
    """Modules and tensors that Dynamo looks into later are noted then; of other things, it may know some at once."""

    def created(value: Any, source: Any, **options: Any) -> Any:
        if _HERE.calls is not None and not isinstance(value, (torch.nn.Module, torch.Tensor)):
            _HERE.calls.events.append(Read(source, value))
        return create(value, source, **options)

    return created
