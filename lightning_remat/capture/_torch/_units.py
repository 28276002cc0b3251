"""Modules that ``fully_shard`` has made units of (FSDP2), called in loops: such a call becomes one node of the graph.

The hooks of a unit gather its parameters before its forward, and let them go after it. Dynamo looks into no such hook: a call
of a unit breaks the graph, and where that is in a loop, it captures nothing of the whole frame. There the call becomes one
node, and the graph is cut at these nodes (see `capture._cut`): what lies between runs by plans, and so does each unit's
forward, within its hooks. What a unit returns must be known for that: it is noted when the unit runs, so that the first time
the frame runs in eager mode around its units.

Dynamo reads all that a frame reads as it is when the frame begins, and changes what the frame changes when its graph has run.
So only the call of a unit that computes, and does nothing else, may become a node: whose whole forward Dynamo has captured as
one graph that changes no object, and that no hook stands around but those of ``fully_shard``.

* ``FSDPModule``, ``FSDPState._state_ctx``: which modules are units, and which others are units of the same network.
* ``UnspecializedNNModuleVariable.call_function``: what Dynamo calls for the call of a module.
* ``InstructionTranslatorBase.maybe_has_backedge``: whether a call is in a loop.
* ``InstructionTranslator.current_tx``, ``OutputGraph.side_effects``, ``.random_calls``: what else a frame does but compute.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch import nn
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch.utils import _pytree as pytree

if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule

    _UNIT: Any = FSDPModule
else:
    _UNIT = ()  # nothing is an instance of that

TRIES = 3
"""Times that a frame is left to run in eager mode around a unit, until what the unit returns is known."""

_NUMBERS = itertools.count()
_UNITS: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


class UnknownUnitError(RuntimeError):
    """Ends the capture of a frame: it calls a unit of which it is not known what it returns."""


@torch.fx.node.has_side_effect
def call_unit(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the unit of this number."""
    return _UNITS[number](*args, **kwargs)


def unit_of(node: torch.fx.Node) -> nn.Module | None:
    """The unit that a node of Dynamo's graph calls; ``None`` for other nodes."""
    if node.op != "call_function" or node.target is not call_unit:
        return None
    number: Any = node.args[0]
    return _UNITS[number]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A parameter of which each process holds a shard.

    Attributes:
        parameter: the shard.
        whole: the parameter that the unit's forward is given; ``None`` where it was never gathered.
        whole_bytes: bytes of that one.
        unit: a number for each unit.
    """

    parameter: nn.Parameter
    whole: nn.Parameter | None
    whole_bytes: int
    unit: int


def shards_of(modules: Iterable[nn.Module]) -> list[Shard]:
    """The parameters of these modules that ``fully_shard`` has sharded."""
    found: dict[int, Shard] = {}
    for state in {id(state): state for state in map(_state_of, units(modules))}.values():
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in groups if groups is not None else [state._fsdp_param_group]:
            for one in group.fsdp_params if group is not None else ():
                dtype = getattr(one, "param_dtype", None) or one.sharded_param.dtype
                nbytes = one._orig_size.numel() * dtype.itemsize
                whole = getattr(one, "_unsharded_param", None)
                found[id(one)] = Shard(one.sharded_param, whole, nbytes, id(state))
    return list(found.values())


def units(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The units among these modules and theirs."""
    found = {id(one): one for module in modules for one in module.modules() if isinstance(one, _UNIT)}
    return list(found.values())


def _there_may_be_units() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _state_of(unit: nn.Module) -> Any:
    return unit._get_fsdp_state()  # type: ignore[operator]


def is_distributed(value: object) -> bool:
    """Whether a value is a distributed tensor, such as a shard."""
    return torch.distributed.is_available() and isinstance(value, torch.distributed.tensor.DTensor)


def only_computes(module: torch.fx.GraphModule) -> bool:
    """Whether the frame whose graph Dynamo has just found is captured whole, and changes nothing but tensors in place."""
    reason = getattr(module, "compile_subgraph_reason", None)
    output = InstructionTranslator.current_tx().output
    effects = output.side_effects
    return not (
        reason is None or reason.graph_break or output.random_calls or effects.tensor_hooks or _changes_objects(effects)
    )


class UnitCalls:
    """The calls of units in the frames of one function: what the units return for which arguments.

    Args:
        graphs: tells how many graphs the present call of the function has run so far.

    Attributes:
        waited: whether a frame of the last call was left to run in eager mode, for what its units return to become known.
    """

    def __init__(self, graphs: Callable[[], int]) -> None:
        self._graphs = graphs
        self._computing: dict[types.CodeType, bool] = {}  # by a frame's code, whether it only computes
        self._known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
        self._hooks: list[Any] = []
        self._unknown = False
        self.waited = False

    def note(self, code: types.CodeType | None, module: torch.fx.GraphModule) -> None:
        """A graph was found in a frame of this code."""
        if code is not None and _there_may_be_units():
            self._computing[code] = self._computing.get(code, True) and only_computes(module)

    def computes(self, unit: nn.Module) -> bool:
        """Whether a unit's forward was captured whole, whenever it was, and does nothing but compute."""
        forward = getattr(unit.forward, "__func__", unit.forward)
        return self._computing.get(getattr(forward, "__code__", None), False)  # type: ignore[arg-type]

    def waits(self) -> bool:
        """Whether the frame that was traced last waits for its units to have run."""
        return self._unknown

    @contextlib.contextmanager
    def as_nodes(self, symbolic: bool) -> Iterator[None]:
        """While Dynamo traces a frame: calls of units in loops become nodes, where that may be."""
        if not _there_may_be_units():
            yield
            return
        owner: Any = UnspecializedNNModuleVariable
        call, ambient = owner.call_function, _ambient()
        self._unknown = False

        def called(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if not isinstance(variable.value, _UNIT) or symbolic or not tx.maybe_has_backedge():
                return call(variable, tx, args, kwargs)
            made = self._as_node(variable, tx, args, kwargs) if _may_be_a_node(variable, tx, ambient) else None
            return made if made is not None else call(variable, tx, args, kwargs)

        owner.call_function = called
        try:
            yield
        finally:
            owner.call_function = call

    def forget_hooks(self) -> None:
        """A call of the function is over: what has not run by now is not waited for."""
        self.waited = bool(self._hooks)
        while self._hooks:
            self._hooks.pop().remove()
        for known in self._known.values():
            known.running.clear()  # of calls that have raised

    def _as_node(self, variable: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The variable of what a unit returns; ``None`` where its call cannot be a node.

        Raises:
            UnknownUnitError: where it has not run with such arguments so far.
        """
        try:
            given = proxy_args_kwargs(list(args), kwargs)
            key = _key(variable.value, pytree.tree_map(_example, given))
        except Exception:  # noqa: BLE001 - whatever Dynamo raises for what is no tensor, constant, or container of such
            return None
        if key is None:
            return None
        known = self._known_of(variable.value)
        if key not in known.returned:
            if known.tries[key] == TRIES:
                return None
            known.tries[key] += 1
            self._watch(variable.value)
            self._unknown = True
            raise UnknownUnitError(f"it is not known yet what {type(variable.value).__name__} returns")
        returned = known.returned[key]
        if returned is None or known.never or not self.computes(variable.value):
            return None
        install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))
        install_guard(AttrSource(variable.source, "training").make_guard(GuardBuilder.CONSTANT_MATCH))
        for name in HOOKS:
            hooks = VariableTracker.build(tx, getattr(variable.value, name), AttrSource(variable.source, name))
            hooks.realize()  # and so guarded on
        with tx.fake_mode, torch.enable_grad():
            example = pytree.tree_map(_made, returned, is_leaf=lambda part: isinstance(part, _Lies))
        proxy = tx.output.create_proxy("call_function", call_unit, (known.number, *given), {})
        proxy.node.meta[RETURNS] = returned
        return wrap_fx_proxy(tx, proxy, example_value=example)

    def never(self, unit: nn.Module) -> None:
        """Calls of this unit are no nodes from now on."""
        self._known_of(unit).never = True

    def _known_of(self, module: nn.Module) -> _Known:
        known = self._known.get(module)
        if known is None:
            known = self._known[module] = _Known(next(_NUMBERS))
            _UNITS[known.number] = module
        return known

    def _watch(self, module: nn.Module) -> None:
        """Note what this unit, and the others of its network, return in the rest of the call that begins."""
        self.forget_hooks()
        for one in _network_of(module):
            known, hooked = self._known_of(one), _has_other_hooks(one)

            def before(module: Any, args: Any, kwargs: Any, known: _Known = known) -> None:
                known.running.append((_key(module, (args, kwargs)), self._graphs(), _tensors((args, kwargs))))

            def after(module: Any, _args: Any, result: Any, known: _Known = known, hooked: bool = hooked) -> None:
                key, graphs, given = known.running.pop() if known.running else (None, 0, [])
                if key is not None:
                    whole = self.computes(module) and self._graphs() == graphs + 1
                    plain = whole and not hooked and all(one._version == version for one, version in given)
                    known.returned[key] = _lies(result) if plain else None

            unseen: Any = torch.compiler.disable  # by Dynamo
            self._hooks.append(one.register_forward_pre_hook(unseen(before), prepend=True, with_kwargs=True))
            self._hooks.append(one.register_forward_hook(unseen(after)))


class _Known:
    """What is known of a unit.

    Attributes:
        number: names it in graphs.
        returned: by the arguments, how what it returns lies; ``None`` for what is no tensor or tuple of such.
        tries: by the arguments, how often a frame was left to run in eager mode.
        running: of calls that have not ended, the arguments, how many graphs had run before, and the tensors among the
            arguments with their version counters.
        never: whether its calls are no nodes, whatever is known.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.returned: dict[Hashable, Any] = {}
        self.tries: collections.Counter[Hashable] = collections.Counter()
        self.running: list[tuple[Hashable | None, int, list[tuple[torch.Tensor, int]]]] = []
        self.never = False


class _Lies:
    """How a tensor lies in memory, and whether it has a gradient."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size, self.stride = tuple(tensor.shape), tensor.stride()
        self.dtype, self.device, self.gradient = tensor.dtype, tensor.device, tensor.requires_grad

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Lies) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


RETURNS = "remat_returns"
"""Key in the ``meta`` of a node that calls a unit: how what it returns lies."""


def as_returned(node: torch.fx.Node, result: Any) -> bool:
    """Whether a unit has returned what the code around a node that calls it was captured for."""
    returned: Any = node.meta[RETURNS]
    if isinstance(returned, _Lies):
        return type(result) is torch.Tensor and _Lies(result) == returned
    return type(result) is type(returned) and _lies(result) == returned


def _lies(result: Any) -> Any:
    """How a unit's result lies; ``None`` where that is nothing that a node can return."""
    parts, spec = pytree.tree_flatten(result)
    plain = all(part is None or (type(part) is torch.Tensor and not vars(part)) for part in parts)
    if not plain or not isinstance(result, torch.Tensor | tuple | list) or not parts:
        return None
    if isinstance(result, tuple | list) and not all(part is None or type(part) is torch.Tensor for part in result):
        return None
    return pytree.tree_unflatten([part if part is None else _Lies(part) for part in parts], spec)


def _tensors(given: Any) -> list[tuple[torch.Tensor, int]]:
    """The tensors in a structure, with their version counters."""
    parts = pytree.tree_leaves(given)
    return [(one, one._version) for one in parts if isinstance(one, torch.Tensor) and not one.is_inference()]


def _made(lies: Any) -> Any:
    """A tensor that lies so."""
    if lies is None:
        return None
    made = torch.empty_strided(
        lies.size, lies.stride, dtype=lies.dtype, device=lies.device, requires_grad=lies.gradient
    )
    return made.view_as(made) if lies.gradient else made


def _example(given: Any) -> Any:
    return given.node.meta["example_value"] if isinstance(given, torch.fx.Proxy) else given


def _key(unit: nn.Module, given: Any) -> Hashable | None:
    """All that tells one call of a unit from another, and the state around it; ``None`` for what no node can be given."""
    parts, spec = pytree.tree_flatten(given)
    found: list[Hashable] = [str(spec), unit.training, *_ambient()]
    for part in parts:
        if isinstance(part, torch.Tensor):
            if any(not isinstance(n, int) for n in (*part.shape, *part.stride())):
                return None
            found.append((tuple(part.shape), part.stride(), part.dtype, part.device, part.requires_grad))
        elif part is None or isinstance(part, bool | int | float | str | torch.dtype | torch.device):
            found.append((type(part), repr(part)))
        else:
            return None
    return tuple(found)


def _ambient() -> tuple[Hashable, ...]:
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_cache_enabled(),
        *((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices),
    )


def _may_be_a_node(variable: Any, tx: Any, ambient: tuple[Hashable, ...]) -> bool:
    """Whether all that a frame has done before a call has been done when the graph is run up to it.

    Dynamo sets attributes and changes lists when the whole graph has run; and a context that is open around the call would
    be one of the graph's.
    """
    if variable.source is None or tx.output.current_tracer.parent is not None or _ambient() != ambient:
        return False
    frame = tx
    while frame is not None:
        if frame.block_stack or frame.current_instruction.exn_tab_entry is not None:  # a context, or a handler
            return False
        frame = getattr(frame, "parent", None)
    return not _changes_objects(tx.output.side_effects)


def _changes_objects(effects: Any) -> bool:
    """Whether a frame changes an object, other than tensors, that was there before it."""
    existing = (AttributeMutationExisting, ValueMutationExisting)
    known = effects.id_to_variable.values()
    return any(isinstance(one.mutation_type, existing) and effects.is_modified(one) for one in known)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _has_other_hooks(unit: nn.Module) -> bool:
    """Whether hooks stand around a unit's forward that are not those of ``fully_shard``."""
    hooks = [hook for name in HOOKS for hook in getattr(unit, name).values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("torch.distributed") for hook in hooks)


def _network_of(module: nn.Module) -> list[nn.Module]:
    """The units of the network that a unit is part of, as far as known before they run for the first time."""
    state = _state_of(module)
    states = getattr(state._state_ctx, "all_states", None) or [state]
    return list({id(one): one for each in states for one in each._modules}.values())
