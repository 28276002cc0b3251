"""The like for AOTAutograd's first run of a forward, in which it looks at inputs and outputs, and makes no graph.

A result that is copied is a tensor that lies as the first one, and, where it is a view, on the memory that it is a view of.
Where functionalization is to know the view, since it is an output, is written to, or read by an op that is run, the op is run
then: no graph is made, so that it does not matter when.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental import proxy_tensor

from lightning_remat.capture._torch.alike._keys import (
    Keys,
    Known,
    Memory,
    UnlikeError,
    inner,
    know,
    known_of,
    note_views,
    shares_memory,
    written_by,
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """What came of an op: its results, fake and wrapped, with how they lie; ``kind`` is their type where there are several."""

    results: tuple[tuple[FakeTensor, torch.Tensor, Any], ...]
    kind: type | None
    views: bool
    shares: bool


class EarlyForms:
    """What came of the ops of a first run.

    Attributes:
        copied: how many were copied.
        writes_to_views: whether an op has written to a view, or to what has one.
    """

    def __init__(self, keys: Keys, own: Callable[..., Any]) -> None:
        self.copied = 0
        self._keys, self._own = keys, own
        self._forms: dict[Any, _Form | None] = {}
        self.writes_to_views = False
        self._off = False  # after an op by which other tensors may lie otherwise

    def call(self, mode: Any, op: OpOverload, types: Any, args: Any, kwargs: Any) -> Any:
        """Results of an op."""
        run = functools.partial(self._own, mode, op, types, args, kwargs)
        if op._schema.is_mutable:
            self._off = self._off or op.namespace != "aten" or torch.Tag.inplace_view in op.tags
            results = run()
            for known in written_by(op, args, kwargs):
                known.lies = None
                self.writes_to_views = self.writes_to_views or known.memory.viewed
            return results
        if self._off:
            return self._ran(run, op, args)
        try:
            key = self._keys.of(op, args, kwargs, self._identity, [])
        except UnlikeError:
            return self._ran(run, op, args)
        if key in self._forms:
            form = self._forms[key]
            return self._ran(run, op, args) if form is None else self._copy(form, mode, op, types, args, kwargs)
        results = self._ran(run, op, args)
        try:
            self._forms[key] = self._form(op, args, results)
        except UnlikeError:
            self._forms[key] = None
        return results

    @staticmethod
    def _ran(run: Callable[[], Any], op: OpOverload, args: Sequence[Any]) -> Any:
        results = run()
        note_views(op, args, results)
        return results

    def _identity(self, tensor: FunctionalTensor) -> FunctionalTensor:
        known = known_of(tensor)
        if known.lies is None:
            known.lies = self._keys.lies(inner(tensor))
        return tensor

    def _form(self, op: OpOverload, args: Sequence[Any], results: Any) -> _Form:
        kind = type(results) if isinstance(results, (tuple, list)) else None
        several = tuple(results) if kind is not None else (results,)
        views = any(isinstance(one, FunctionalTensor) and known_of(one).view for one in several)
        if any(type(one) is not FunctionalTensor or any(one is arg for arg in args) for one in several):
            raise UnlikeError
        if views and [type(one) is FunctionalTensor for one in args].count(True) != 1:
            raise UnlikeError
        if views and type(args[0]) is not FunctionalTensor:
            raise UnlikeError
        fakes = [inner(one) for one in several]
        forms = [(one, torch._to_functional_tensor(one), self._keys.lies(one)) for one in fakes]
        return _Form(tuple(forms), kind, views, views and shares_memory(op))

    def _copy(self, form: _Form, mode: Any, op: OpOverload, types: Any, args: Any, kwargs: Any) -> Any:
        self.copied += 1
        memory = None
        if form.views:
            base = known_of(args[0])
            memory = base.memory
            memory.viewed = True
            if base.make is None:
                base.made = args[0].elem
            viewed = functools.cache(functools.partial(self._viewed, mode, op, types, base, args[1:], kwargs))
        results = []
        for i, (fake, wrapped, lies) in enumerate(form.results):
            tensor: Any = FunctionalTensor(wrapped, mode)
            make: Callable[[], torch.Tensor] = functools.partial(_fresh, fake)
            if form.views:
                make = functools.partial(_elem, viewed, i if form.kind is not None else None)
            if form.shares:
                torch._functionalize_unsafe_set(tensor, args[0])
            know(tensor, Known(memory or Memory(), memory is not None, lies=lies, make=make))
            results.append(tensor)
        return results[0] if form.kind is None else form.kind(results)

    def _viewed(self, mode: Any, op: OpOverload, types: Any, base: Known, others: Any, kwargs: Any) -> Any:
        """Views of a tensor; not made of the tensor itself, which autograd's graph holds, that holds the views."""
        with torch._C._AutoDispatchBelowAutograd():
            return self._own(mode, op, types, (FunctionalTensor(base.elem(), mode), *others), kwargs)


def _elem(results: Callable[[], Any], place: int | None) -> torch.Tensor:
    found: Any = results() if place is None else results()[place]
    return found.elem  # type: ignore[no-any-return]


def _fresh(like: FakeTensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        fake: Any = proxy_tensor.snapshot_fake(like)
    return torch._to_functional_tensor(fake)
