"""Gradients that are differentiated again outside of the step (``backward(create_graph=True)``, as AdaHessian and Sophia do).

A captured graph is one node of autograd's graph, and its gradients have no graph of their own. Where a backward is to be
differentiated, the forward is evaluated once more, op by op, with the random numbers of the call. If autograd computes from
that what the captured backward has computed, bit for bit, its differentiable gradients are returned instead. (These may have
other last bits, in eager mode too: formulas that can be differentiated are others, as that of SiLU.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from lightning_remat.capture._torch import captured_node, copied

Tensor = torch.Tensor


class NotAgainError(Exception):
    """Says why gradients cannot be computed once more."""


@dataclasses.dataclass
class Evaluation:
    """One evaluation of a captured graph.

    Attributes:
        graph: what was evaluated.
        args: its arguments: weak references to those tensors that are no parameters.
        states: of random number generators, before it.
        again: whether it has been evaluated once more.
    """

    graph: Differentiated
    args: Sequence[Any]
    states: Mapping[torch.device, bytes]
    again: bool = False

    def differentiable(self, node: Any, failed: Callable[[str], None]) -> None:
        """Have the gradients that a node is about to compute replaced by differentiable ones.

        Args:
            node: its node in autograd's graph, whose backward begins.
            failed: told why they stay as they are: torch raises an error once they are differentiated.
        """
        handles: list[Any] = []

        def computed(gradients: Sequence[Tensor | None], tangents: Sequence[Tensor | None]) -> Any:
            handles.pop().remove()
            try:
                return self.graph.computed(gradients, tangents, self)
            except NotAgainError as error:
                failed(
                    f"its gradients cannot be computed as in eager mode ({error}): differentiated again, they end in an error"
                )
                return None

        handles.append(node.register_hook(computed))


class Differentiated:
    """Makes the gradients of a captured graph differentiable, in the backwards that ask for it.

    Args:
        plainly: the forward, as Dynamo has captured it.
        around: opens what was set in torch when it was captured.
        devices: those whose random numbers it draws.
        written: positions of the arguments that it writes to; ``None`` among them for what is no argument itself.
    """

    def __init__(
        self,
        plainly: Callable[..., Any],
        around: Callable[[], contextlib.AbstractContextManager[Any]],
        devices: Sequence[torch.device],
        written: Collection[int | None],
    ) -> None:
        self._plainly, self._around, self._devices, self._written = plainly, around, devices, written
        self._activations: list[int] | None = None
        self._outputs: dict[int, int] = {}
        self._arguments: list[int | None] | None = None

    def begins(self, args: Sequence[Any]) -> Evaluation:
        """What is to be known of a call, before its forward; it keeps nothing alive but parameters."""
        if self._activations is None:  # Dynamo guards on types
            self._activations = [i for i, one in enumerate(args) if _is_activation(one)]
        kept = list(args)
        for i in self._activations:
            kept[i] = weakref.ref(kept[i])
        return Evaluation(self, kept, {device: _state(device) for device in self._devices})

    def ran(self, given: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Look, once, where the graph's arguments and outputs are among those of its node in autograd's graph.

        Args:
            given: the arguments, as the node has them.
            outputs: what it returned.
        """
        if self._arguments is not None:
            return
        nodes = {node for one in given if (node := _node(one)) is not None}
        own = [(i, one.grad_fn, one.output_nr) for i, one in enumerate(outputs) if _node(one) not in (None, *nodes)]
        made = [(i, number) for i, node, number in own if captured_node(outputs[i])[0] is node]
        self._outputs = {number: i for i, number in made}
        self._arguments = []
        if made:
            edges = {_edge(one): i for i, one in reversed(list(enumerate(given))) if _has_gradient(one)}
            node = outputs[made[0][0]].grad_fn
            self._arguments = [edges.get(edge) for edge in node.next_functions]

    def computed(
        self, gradients: Sequence[Tensor | None], tangents: Sequence[Tensor | None], call: Evaluation
    ) -> tuple[Tensor | None, ...]:
        """The gradients of a call's node in autograd's graph, differentiable.

        Args:
            gradients: as the captured backward has computed them.
            tangents: the gradients that it was given.
            call: the call.

        Raises:
            NotAgainError: where they cannot be computed once more.
        """
        args = [one() if isinstance(one, weakref.ref) else one for one in call.args]
        if any(was is not None and one is None for was, one in zip(call.args, args, strict=True)):
            raise NotAgainError("what the graph was given is gone")
        places = self._arguments or []
        with_tangents = {i: one for i, one in enumerate(tangents) if one is not None}
        if not with_tangents.keys() <= self._outputs.keys() or len(places) != len(gradients):
            raise NotAgainError("its gradients come through views of what it returned")
        if any(one is not None and place is None for one, place in zip(gradients, places, strict=True)):
            raise NotAgainError("its gradients leave it in parts")
        if any(i is None or _has_gradient(args[i]) for i in self._written):
            raise NotAgainError("it writes to what it is given")
        given = _apart(args, self._written)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([one for one in call.states if one.type == "cuda"]))
            stack.enter_context(self._around())
            for device, state in call.states.items():
                _set_state(device, state)
            outputs = self._plainly(*given)
        wanted = [i for one, i in zip(gradients, places, strict=True) if one is not None and i is not None]
        again = functools.partial(
            torch.autograd.grad,
            [outputs[self._outputs[i]] for i in with_tangents],
            [given[i] for i in wanted],
            list(with_tangents.values()),
            retain_graph=True,
            allow_unused=True,
        )
        with torch.no_grad():
            same = all(map(_same, (one for one in gradients if one is not None), again(create_graph=False)))
        if not same:
            raise NotAgainError("evaluated once more, it has other gradients")
        call.again = True
        found = iter(again(create_graph=True))
        return tuple(None if one is None else next(found) for one in gradients)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _node(value: Any) -> Any:
    return value.grad_fn if isinstance(value, Tensor) else None


def _edge(value: Tensor) -> tuple[Any, int]:
    edge = get_gradient_edge(value)
    return edge.node, edge.output_nr


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter)


def _apart(args: Sequence[Any], written: Collection[int | None]) -> list[Any]:
    """Arguments none of which was computed from another, as autograd sees it; copies of those that are written to.

    Leaves are handed on as they are where nothing else has a gradient: autocast keeps its copies of leaves alone.
    """
    leaves = all(one.is_leaf for one in args if _has_gradient(one))

    @functools.cache
    def apart(place: int) -> Any:
        value = args[place]
        if not isinstance(value, Tensor):
            return value
        if not value.requires_grad:
            return copied(value) if place in written else value
        return value if leaves else value.view_as(value)

    first = {id(one): i for i, one in reversed(list(enumerate(args)))}
    return [apart(first[id(one)]) for one in args]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num()))


def _state(device: torch.device) -> bytes:
    """The state of a random number generator, not as a tensor: no plan has room for that."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return state.numpy().tobytes()


def _set_state(device: torch.device, state: bytes) -> None:
    given = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if device.type == "cuda":
        torch.cuda.set_rng_state(given, device)
    else:
        torch.set_rng_state(given)
