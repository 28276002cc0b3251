"""How functional tensors lie, and by what an op is known again: itself, its constants, and how the tensors lie that it reads.

* ``torch._from_functional_tensor``: the fake tensor in a functional one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

_CONSTANTS = {int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


class UnlikeError(Exception):
    """Something is not understood: the op is traced."""


@dataclasses.dataclass(slots=True)
class Memory:
    """What tensors that are views of one another share.

    Attributes:
        viewed: whether there is a view.
        unknown: whether one of the views was copied, so that functionalization does not know that it is one.
        written: whether an op has written to it: its views' nodes are made anew when they are read.
        lost: whether that was while there was a view: no tensor's node is known any more.
    """

    viewed: bool = False
    unknown: bool = False
    written: bool = False
    lost: bool = False


@dataclasses.dataclass(slots=True)
class Known:
    """What is known of a functional tensor.

    Attributes:
        memory: see `Memory`.
        view: whether it was made as a view of another.
        node: the node that it is; ``None`` where it must be looked up, or no graph is made.
        lies: how it lies; equal for tensors that lie alike, ``None`` where it must be looked up.
        make: of a copied op's result, makes what it is to the modes below.
        made: what that has made, or what the tensor is to the modes below anyway, where a view of it may have to be made.
    """

    memory: Memory = dataclasses.field(default_factory=Memory)
    view: bool = False
    node: torch.fx.Node | None = None
    lies: Any = None
    make: Callable[[], torch.Tensor] | None = None
    made: torch.Tensor | None = None

    def elem(self) -> torch.Tensor:
        """What the tensor is to the modes below, where `make` or `made` is known."""
        if self.make is not None:
            make, self.make = self.make, None
            self.made = make()
        assert self.made is not None
        return self.made


_KNOWN = "_lightning_remat_known"


def known_of(tensor: Any) -> Known:
    """What is known of a functional tensor, to be added to."""
    found: Known | None = vars(tensor).get(_KNOWN)
    if found is None:
        found = Known()
        setattr(tensor, _KNOWN, found)
    return found


def know(tensor: Any, known: Known) -> None:
    """Let this be known of a functional tensor."""
    setattr(tensor, _KNOWN, known)


def made_later() -> property:
    """For ``FunctionalTensor.elem``: of a copied op's result, it is made when it is asked for.

    (The tensor has one before, of another tensor that lies alike, for whoever comes upon it after the trace.)
    """

    def get(tensor: Any) -> Any:
        own = vars(tensor)
        known: Known | None = own.get(_KNOWN)
        if known is not None and (known.make is not None or known.made is not None):
            own["elem"] = known.elem()
        return own["elem"]

    def set_to(tensor: Any, value: Any) -> None:
        own = vars(tensor)
        own["elem"] = value
        if _KNOWN in own:
            own[_KNOWN].make, own[_KNOWN].made = None, value

    return property(get, set_to)


def is_constant(value: Any) -> bool:
    """Whether an argument is a constant that equals others of its kind."""
    return type(value) in _CONSTANTS or type(value) is float


class Keys:
    """Keys of ops' calls."""

    def __init__(self) -> None:
        self._alike: dict[Any, Any] = {}

    def of(
        self,
        op: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        identity: Callable[[FunctionalTensor], Any],
        read: list[Any],
    ) -> Any:
        """All that tells what comes of an op.

        Args:
            op: the op.
            args: its arguments.
            kwargs: those that are named.
            identity: what a tensor is known by; `Known.lies` is known then.
            read: these are added to it, each once.

        Raises:
            UnlikeError: where there is more.
        """
        if op.namespace != "aten":
            raise UnlikeError
        parts = tuple([self._part(one, identity, read) for one in args])
        named = tuple([(name, self._part(one, identity, read)) for name, one in kwargs.items()])
        return op, parts, named, torch.is_grad_enabled(), torch.get_default_dtype()

    def _part(self, value: Any, identity: Callable[[FunctionalTensor], Any], read: list[Any]) -> Any:
        kind = type(value)
        if kind is FunctionalTensor:
            one = identity(value)
            for i, other in enumerate(read):
                if other is one:
                    return i
            read.append(one)
            return known_of(value).lies
        if kind in _CONSTANTS:
            return kind, value
        if kind is float:
            return kind, value.hex()  # -0.0 is not 0.0
        if kind in (tuple, list, torch.Size):
            return kind, *[self._part(one, identity, read) for one in value]
        raise UnlikeError

    def lies(self, fake: Any) -> Any:
        """How a fake tensor lies; one object for all that lie alike.

        Raises:
            UnlikeError: where it is something else, or has numbers, by which may go what comes of an op.
        """
        if type(fake) is not FakeTensor or fake.constant is not None or fake.layout is not torch.strided:
            raise UnlikeError
        if fake.is_quantized or fake.dtype.is_complex or fake.is_neg() or fake._is_zerotensor():
            raise UnlikeError
        if not all(type(size) is int for size in (*fake.shape, *fake.stride())):
            raise UnlikeError
        where = fake.storage_offset(), fake.untyped_storage().nbytes()
        lies = tuple(fake.shape), fake.stride(), where, fake.dtype, fake.device
        return self._alike.setdefault(lies, (len(self._alike),))


def inner(tensor: FunctionalTensor) -> Any:
    """What a functional tensor is to the modes below: a fake one."""
    return torch._from_functional_tensor(tensor.elem)


def shares_memory(op: OpOverload) -> bool:
    """Whether an op's results may be views of its arguments, by what it says of itself."""
    return any(one.alias_info is not None for one in op._schema.returns)


def note_views(op: OpOverload, args: Sequence[Any], results: Any) -> bool:
    """Note of an op's results, where they are views, what they are views of; returns whether they are.

    Functionalization takes some for views that the op does not say are (``_unsafe_view``).
    """
    given = [one for one in args if isinstance(one, FunctionalTensor)]
    several = results if isinstance(results, (tuple, list)) else (results,)
    others = [one for one in several if isinstance(one, FunctionalTensor) and all(one is not arg for arg in given)]
    views = bool(given and others) and (shares_memory(op) or not all(one.is_base_tensor() for one in others))
    if views:
        memory = known_of(given[0]).memory
        memory.viewed = True
        for one in others:
            known = known_of(one)  # of an op that this one is made of, maybe, which was copied
            memory.unknown = memory.unknown or known.memory.unknown
            known.memory, known.view = memory, True
    return views


def written_by(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Known]:
    """What is known of the tensors that an op writes to."""
    written: list[Known] = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            tensors = value if isinstance(value, (tuple, list)) else (value,)
            written += [known_of(one) for one in tensors if isinstance(one, FunctionalTensor)]
    return written
