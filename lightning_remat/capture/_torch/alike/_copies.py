"""A call of a module that was traced, and what is made of it where another module is called that is alike.

* ``VariableBuilder``: makes a tensor that is found by a source an input of the graph.
* ``wrap_fx_proxy``, ``get_fake_value``: make a tensor of a node.
* ``RestartAnalysis``: has Dynamo begin again.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import torch
import torch.fx
from torch._dynamo.exc import RestartAnalysis, TorchDynamoException
from torch._dynamo.utils import get_fake_value
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import Guard, Source, TracingContext

from lightning_remat.capture._torch._guards import source_name
from lightning_remat.capture._torch.alike._reads import (
    At,
    Pairs,
    Places,
    Read,
    UnlikeError,
    check_of,
    is_as_it_was,
    or_unlike,
)
from lightning_remat.capture._torch.alike._trace import Trace

Node = torch.fx.Node

_PATH = re.compile(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]")
_OF_PLACES = {"creation_timestamp", "example_value", "nn_module_stack", "source_fn_stack"}
_IDENTITIES = {"BUILTIN_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH", "ID_MATCH", "MODULE_MATCH"}
"""Guards on a value being one and the same object."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call that was traced.

    Attributes:
        module: that was called.
        name: the module's, as nodes note it.
        around: how many modules' calls were under way around it.
        args: the variables of its arguments.
        given: those of the tensors among them that were computed.
        result: the variable of its result.
        returned: the nodes of the result's tensors, and whether each was named at the end of the call.
        nodes: of the call, in their order, with the names that they were given.
        events: what was read and guarded on, in their order, each with its place in the module, if it has one.
        places: these.
        same: modules, tensors, lists and the like that are not the module's, and were looked at.
        names: of the modules that were called.
        writes: how much had been written.
        anew: whether tensors are made anew for all nodes.
    """

    module: torch.nn.Module
    name: str
    around: int
    args: list[Any]
    given: list[Any]
    result: Any
    returned: dict[Node, bool]
    nodes: list[tuple[Node, str]]
    events: list[tuple[int | None, Read | Guard]]
    places: Places
    same: list[Any]
    names: list[str]
    writes: int
    anew: bool


class Copy:
    """A call that becomes what another one has become.

    Args:
        trace: what is noted of the graph.
        known: the other call.
        variable: of the module.
        tx: what translates.
        given: the variables of the tensors among the arguments that were computed.

    Raises:
        UnlikeError: where it would become something else.
    """

    @or_unlike
    def __init__(self, trace: Trace, known: Call, variable: Any, tx: Any, given: list[Any]) -> None:
        self._trace, self._known, self._tx, self._given = trace, known, tx, given
        if known.module is variable.value or known.writes != trace.writes.number:
            raise UnlikeError
        if trace.writes.are_in(known.module) or trace.writes.are_in(variable.value):
            raise UnlikeError
        self.name = path(variable)
        self._at = At(known.places, variable.source, variable.value)
        self._pairs = Pairs()
        self._pairs.compare(known.module, variable.value)
        for one in known.same:
            self._pairs.pair(one, one)
        for place, event in known.events:
            if place is not None:
                self._compare(place, event)
        for place in range(len(known.places.known)):
            if trace.writes.are_to(known.places.value(place)) or trace.writes.are_to(self._at.value(place)):
                raise UnlikeError
        self._names = [self._renamed(name) for name in known.names]
        if any(name in tx.num_calls for name in self._names):
            raise UnlikeError
        self._stacks = [self._stack(node) for node, _ in known.nodes]
        self._nodes: dict[Node, Node] = {}
        self._variables: dict[Node, Any] = {}
        self._shared: set[int] = set()

    def _compare(self, place: int, event: Read | Guard) -> None:
        before, now = self._known.places.value(place), self._at.value(place)
        self._pairs.compare(event.value if isinstance(event, Read) else before, now)
        if isinstance(event, Read):
            return
        check, args, kwargs = check_of(event)
        if check.__name__ in _IDENTITIES and before is not now:
            raise UnlikeError
        if check.__name__ == "DUPLICATE_INPUT":
            other = self._known.places.position(next(iter((*args, *kwargs.values()))))
            if now is not (before if other is None else self._at.value(other)):
                raise UnlikeError

    def _renamed(self, name: str) -> str:
        before = self._known.name
        if not name.startswith(before) or name[len(before) : len(before) + 1] not in ("", ".", "["):
            raise UnlikeError
        return self.name + name[len(before) :]

    def _stack(self, node: Node) -> dict[str, Any]:
        """The modules in which a node is."""
        stack = dict(self._tx.nn_module_stack)
        for key, (name, kind) in list(node.meta.get("nn_module_stack", {}).items())[self._known.around :]:
            module = self._pairs.modules.get(int(key)) if key.isdecimal() else None
            if module is None:
                raise UnlikeError
            stack[str(id(module))] = (self._renamed(name), kind)
        return stack

    def made(self) -> Any:
        """The variable of the result.

        Raises:
            RestartAnalysis: where something is otherwise than it looked.
        """
        try:
            self._tx.num_calls.update(dict.fromkeys(self._names, 1))
            for before, now in zip(self._known.given, self._given, strict=True):
                self._map(before.as_proxy().node, now)
            for place, event in self._known.events:
                if place is None:
                    self._read_elsewhere(event)
                elif not self._is_shared(place):
                    self._read(place, event)
            for (node, name), stack in zip(self._known.nodes, self._stacks, strict=True):
                self._copy(node, name, stack)
            return self._result(self._known.result)
        except TorchDynamoException:
            raise
        except Exception as error:
            self._trace.off = True
            raise RestartAnalysis(restart_reason="a module is called that is not alike") from error

    def _read_elsewhere(self, event: Read | Guard) -> None:
        """What is not the module's was looked at in this call, too, which others around it are to know."""
        self._trace.events.append(event)
        if isinstance(event, Read) and event.node in self._known.returned:
            self._variables[event.node] = VariableBuilder(self._tx, event.source)(event.value).realize()

    def _is_shared(self, place: int) -> bool:
        """Whether an object, or what it lies on, is one that the modules share, and that Dynamo knows by another source."""
        if place in self._shared or any(one in self._shared for one in self._known.places.below(place)):
            self._shared.add(place)
            return True
        value = self._at.value(place)
        alike = value is self._known.places.value(place) and not isinstance(value, (torch.nn.Module, torch.Tensor))
        if not alike or value not in self._trace.output.side_effects:
            return False
        VariableBuilder(self._tx, self._at.source(place))(value)  # guards on its being the same
        self._shared.add(place)
        return True

    def _read(self, place: int, event: Read | Guard) -> None:
        """What was read and guarded on is so here, too."""
        source, output = self._at.source(place), self._trace.output
        if self._known.places.sources[place] in output.guard_on_key_order:
            output.guard_on_key_order.add(source)
        if isinstance(event, Guard):
            guards = TracingContext.get().guards_context.dynamo_guards
            guards.add(self._guard(event, source), collect_debug_stack=False)
        elif event.node is None:
            value = self._at.value(place)
            self._trace.events.append(Read(source, value))
            if value is event.value and isinstance(value, torch.nn.Module) and value in output.side_effects:
                VariableBuilder(self._tx, source)(value)  # guards on its being the same
        else:
            made = VariableBuilder(self._tx, source)(self._at.value(place)).realize()
            assert type(made) is TensorVariable, "what is made of a tensor"
            assert is_as_it_was(made.as_proxy().node, self._at.value(place)), "a tensor that was written to"
            self._map(event.node, made)

    def _guard(self, guard: Guard, source: Source) -> Guard:
        check: Any = guard.create_fn
        if isinstance(check, functools.partial):
            function, args, kwargs = check_of(guard)
            moved = functools.partial(self._known.places.moved, at=self._at)
            check = functools.partial(function, *map(moved, args), **{name: moved(one) for name, one in kwargs.items()})
        return Guard(source, check, stack=guard.stack, user_stack=guard.user_stack)

    def _map(self, before: Node, now: Any) -> None:
        node = now.as_proxy().node
        self._nodes[before] = node
        self._variables[node] = now

    def _copy(self, node: Node, name: str, stack: dict[str, Any]) -> None:
        tracer = self._trace.output.current_tracer
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: self._nodes.get(one, one))
        made = tracer.create_node(node.op, node.target, args, kwargs)
        made.meta.update({key: value for key, value in node.meta.items() if key not in _OF_PLACES})
        if stack:
            made.meta["nn_module_stack"] = stack
        *around, (_, kind) = node.meta["source_fn_stack"]
        made.meta["source_fn_stack"] = [*around, (made.name, kind)]
        if name:
            made._rename(name)
            self._trace.named[made] = name
        self._nodes[node] = made
        if node in self._known.returned:
            result: Any = wrap_fx_proxy(self._tx, torch.fx.Proxy(made, tracer))
            assert is_as_it_was(made, node.meta["example_value"]), "a tensor that lies otherwise"
            result._is_name_set = self._known.returned[node]
            self._variables[made] = result
        elif self._known.anew:
            made.meta["example_value"] = get_fake_value(made, self._tx, allow_non_graph_fake=True)
        else:
            made.meta["example_value"] = node.meta["example_value"]

    def _result(self, variable: Any) -> Any:
        kind = type(variable)
        if kind is TupleVariable:
            return TupleVariable([self._result(realized(part)) for part in variable.items])
        if kind is ConstantVariable:
            return variable
        node = variable.as_proxy().node
        return self._variables[self._nodes.get(node, node)]


def path(variable: Any) -> str:
    """A module's name, as nodes note it."""
    return _PATH.sub(r".\2", source_name(variable.get_nn_module_stack_source()))


def realized(variable: Any) -> Any:
    """What a variable has become that waited to be asked for; itself where it waits."""
    return variable.unwrap() if issubclass(type(variable), LazyVariableTracker) else variable
