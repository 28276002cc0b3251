"""Gradients that are differentiated again outside of the step (``backward(create_graph=True)``, as AdaHessian and Sophia do).

A captured graph is one node of autograd's graph, and its gradients have no graph of their own. Where a backward is to be
differentiated, the forward is evaluated once more, op by op, with the random numbers of the call. If autograd computes from
that what the captured backward has computed, bit for bit, its differentiable gradients are returned instead. (These may have
other last bits, in eager mode too: formulas that can be differentiated are others, as that of SiLU.)

What comes back to these gradients, in the backward after that, is kept until that backward has come to the node itself, and
goes with what comes to the node through that second evaluation in one backward: sums are made where eager mode makes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from lightning_remat.capture._torch import (
    Remembered,
    backward_number,
    captured_node,
    copied,
    graph_is_kept,
    outside_of_batches,
    sources_of_gradients,
)
from lightning_remat.capture.gradients._pass import Gradients, Pass, gradients_of, uncaptured
from lightning_remat.capture.gradients._sums import HandedOut
from lightning_remat.errors import CaptureError

Tensor = torch.Tensor
Tell = Callable[[str], None]

Ported = Mapping[int, Tensor]
"""Gradients that come to ports, by the ports' positions (see ``_ports``)."""

Tangents = tuple[Sequence[Tensor | None], Ported]
"""Gradients of a node's outputs in autograd's graph, by their numbers there, and those of other outputs."""

OTHER_BITS = "gradients of this step may have other last bits, and later calls run as before"


class NotAgainError(Exception):
    """Says why gradients cannot be computed once more."""


@dataclasses.dataclass
class Evaluation:
    """One evaluation of a captured graph.

    Attributes:
        graph: what was evaluated.
        args: its arguments: those tensors that are no parameters are not kept alive, but for first calls.
        states: of random number generators, before it.
        handed_out: the gradients that autograd adds up.
        outputs: by position, weak references to what it returned.
        given: the arguments of the second evaluation, apart from those that autograd knows.
        again: what that returned; ``None`` where there was none.
        passes: the backwards through it that may be differentiated.
        ports: by the position of a port, that of its view among the outputs.
        backward: number of the last backward that has come to its node.
    """

    graph: Differentiated
    args: Sequence[Any]
    states: Mapping[torch.device, Any]
    handed_out: HandedOut
    outputs: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    given: Sequence[Any] = ()
    again: Sequence[Any] | None = None
    passes: list[Pass] = dataclasses.field(default_factory=list)
    ports: Mapping[int, int] = dataclasses.field(default_factory=dict)
    backward: int = -1

    @property
    def is_differentiated(self) -> bool:
        """Whether the backward that runs has differentiated gradients of it."""
        return any(one.backward == backward_number() for one in self.passes)

    def ran(self, given: Sequence[Any], outputs: Sequence[Any], views: Sequence[int]) -> None:
        """The forward has run.

        Args:
            given: the arguments, as its node in autograd's graph has them.
            outputs: what it returned.
            views: the positions of the outputs that have a port.
        """
        self.ports = dict(enumerate(views, len(outputs)))
        self.outputs = {i: weakref.ref(one) for i, one in enumerate(outputs) if _has_gradient(one)}
        self.graph.ran(given, outputs)

    def over(self) -> None:
        """Its backward begins, and if it is the last one, nothing of it is needed any more."""
        self.backward, self.graph.is_known = backward_number(), True
        if self.again is None and not graph_is_kept():
            self.args = ()

    def differentiable(self, node: Any, ported: Ported, failed: Tell) -> None:
        """Have the gradients that a node is about to compute replaced by differentiable ones.

        Args:
            node: its node in autograd's graph, whose backward begins.
            ported: gradients that come to ports (see ``_ports``).
            failed: told why they stay as they are: torch raises an error once they are differentiated.
        """
        handles: list[Any] = []

        def computed(gradients: Sequence[Tensor | None], tangents: Sequence[Tensor | None]) -> Any:
            handles.pop().remove()
            try:
                return uncaptured(self.graph.gradients)(self, node, gradients, (tangents, ported), failed)
            except NotAgainError as error:
                failed(
                    f"its gradients cannot be computed as in eager mode ({error}): differentiated again, they end in an error"
                )
                return None

        handles.append(node.register_hook(computed))

    def in_batches(
        self, tangents: Sequence[Tensor | None], ported: Ported, failed: Tell
    ) -> dict[int, Tensor | None] | None:
        """The gradients of the call for several gradients of its outputs at once (``is_grads_batched=True``).

        Args:
            tangents: those that come to its node in autograd's graph, by the number of the node's output.
            ported: likewise, to ports (see ``_ports``).
            failed: told why they cannot be computed, which ends in an error.

        Returns:
            By the position of an argument, its gradient; ``None`` where they cannot be computed.
        """
        try:
            found: dict[int, Tensor | None] = uncaptured(self.graph.gradients_in_batches)(self, (tangents, ported))
        except NotAgainError as error:
            failed(f"its gradients cannot be computed as in eager mode ({error}): in batches, they end in an error")
            return None
        return found

    def together(
        self, node: Any, tangents: Sequence[Tensor | None], ported: Ported, failed: Tell
    ) -> dict[int, Tensor | None]:
        """The gradients of the call, and of gradients that were computed from it, in one backward.

        Args:
            node: its node in autograd's graph, whose backward begins.
            tangents: the gradients that come to the node, by the number of its output.
            ported: likewise, to ports (see ``_ports``).
            failed: told where they may have other last bits.

        Returns:
            By the position of an argument, its gradient.

        Raises:
            CaptureError: where that is not possible.
        """
        found: dict[int, Tensor | None] = uncaptured(self.graph.gradients_together)(
            self, node, (tangents, ported), failed
        )
        return found


class Differentiated:
    """Makes the gradients of a captured graph differentiable, in the backwards that ask for it.

    Args:
        plainly: the forward, as Dynamo has captured it.
        around: opens what was set in torch when it was captured.
        devices: those whose random numbers it draws.
        written: positions of the arguments that it writes to; ``None`` among them for what is no argument itself.

    Attributes:
        is_known: whether a backward has come to it that is not differentiated: until then arguments are kept alive.
    """

    def __init__(
        self,
        plainly: Callable[..., Any],
        around: Callable[[], contextlib.AbstractContextManager[Any]],
        devices: Sequence[torch.device],
        written: Collection[int | None],
    ) -> None:
        self._plainly, self._around, self._devices, self._written = plainly, around, devices, written
        self.is_known = False
        self._activations: list[int] | None = None
        self._outputs: dict[int, int] = {}
        self._arguments: list[int | None] | None = None

    def begins(self, args: Sequence[Any], handed_out: HandedOut, first: bool) -> Evaluation:
        """What is to be known of a call, before its forward.

        Args:
            args: the arguments.
            handed_out: the gradients that autograd adds up.
            first: whether it is the graph's first call, in which it keeps the arguments alive; later nothing but parameters.
        """
        if self._activations is None:  # Dynamo guards on types
            self._activations = [i for i, one in enumerate(args) if _is_activation(one)]
        kept = list(args)
        for i in self._activations if self.is_known and not first else ():
            kept[i] = Remembered(kept[i])
        return Evaluation(self, kept, {device: _state(device) for device in self._devices}, handed_out)

    def ran(self, given: Sequence[Any], outputs: Sequence[Any]) -> None:
        """The forward has run; look, once, where arguments and outputs are among those of its node in autograd's graph."""
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

    def gradients(
        self,
        call: Evaluation,
        node: Any,
        computed: Sequence[Tensor | None],
        tangents: Tangents,
        failed: Tell,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of a call's node in autograd's graph, differentiable.

        Args:
            call: the call.
            node: the node.
            computed: the gradients, as the captured backward has computed them.
            tangents: the gradients that it was given.
            failed: told where they may have other last bits.

        Raises:
            NotAgainError: where they cannot be computed once more.
        """
        places = self._arguments or []
        if len(places) != len(computed) or any(
            one is not None and place is None for one, place in zip(computed, places, strict=True)
        ):
            raise NotAgainError("its gradients leave it in parts")
        of, own = self._evaluate(call, tangents)
        args, again, given = call.args, call.again or (), call.given
        apart = [one.detach().requires_grad_(one.requires_grad) for one in own]
        wanted = [i for one, i in zip(computed, places, strict=True) if one is not None and i is not None]
        if not wanted:
            return tuple(computed)

        def gradients(outputs: Sequence[Any], given: Sequence[Any], values: Sequence[Tensor], create: bool) -> Any:
            roots, leaves = [outputs[i] for i in of], [given[i] for i in wanted]
            return torch.autograd.grad(roots, leaves, values, retain_graph=True, create_graph=create, allow_unused=True)

        sums = [
            call.handed_out.sum(i, one)
            for one, i in zip(computed, places, strict=True)
            if one is not None and i is not None
        ]
        call.handed_out.begin()
        with torch.no_grad():
            if not all(map(_same, sums, gradients(again, given, apart, create=False))):
                raise NotAgainError("evaluated once more, it has other gradients")
        found = gradients(again, given, apart, create=True)
        one_pass = Pass([one for one in found if _has_gradient(one)], apart)
        call.passes.append(one_pass)

        def linked_to_args(cotangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
            failed(
                f"gradients of its gradients are differentiated, whose sums eager mode adds up in another order: {OTHER_BITS}"
            )
            views = _linked(args)
            linked = gradients(self._evaluated(call, views), views, own, create=True)
            of_these = [*own, *(one for one in views if _has_gradient(one))]
            return gradients_of([one for one in linked if _has_gradient(one)], of_these, cotangents, create_graph=True)

        def apart_from_node(cotangents: Sequence[Tensor | None], late: bool) -> Sequence[Tensor | None]:
            if late or len(call.passes) > 1:
                failed(
                    f"gradients of its gradients come one by one, and eager mode adds them up in another order: {OTHER_BITS}"
                )
            leaves = [one for one in given if _has_gradient(one)]
            return gradients_of(one_pass.gradients, [*apart, *leaves], cotangents)

        anchor = next((one for ref in call.outputs.values() if (one := ref()) is not None), None)
        apply: Any = Gradients.apply  # without types before torch 2.14
        made = apply(
            one_pass,
            call,
            node,
            apart_from_node,
            linked_to_args,
            anchor,
            *own,
            *(one for one in args if _has_gradient(one)),
        )
        nodes = iter(made)
        found = iter([next(nodes) if _has_gradient(one) else one for one in found])
        return tuple(None if one is None else next(found) for one in computed)

    def _evaluate(self, call: Evaluation, tangents: Tangents) -> tuple[list[int], list[Tensor]]:
        """Evaluate a call once more, unless that was done; returns the positions of outputs with gradients, and these.

        Raises:
            NotAgainError: where that is not possible.
        """
        args = [one() if isinstance(one, Remembered) else one for one in call.args]
        if len(args) == 0 or any(was is not None and one is None for was, one in zip(call.args, args, strict=True)):
            raise NotAgainError("what the graph was given is gone")
        of, own = self._of(call, tangents)
        if any(i is None or _has_gradient(args[i]) for i in self._written):
            raise NotAgainError("it writes to what it is given")
        call.args = args
        if call.again is None:
            call.given = _apart(args)
            call.again = self._evaluated(call, call.given)
        return of, own

    def _of(self, call: Evaluation, tangents: Tangents) -> tuple[list[int], list[Tensor]]:
        """The positions of the outputs that have gradients, and the gradients.

        Raises:
            NotAgainError: where it cannot be told whose they are.
        """
        come, ported = tangents
        numbers = [number for number, one in enumerate(come) if one is not None]
        if any(number not in self._outputs for number in numbers):
            raise NotAgainError("its gradients come through views of what it returned")
        of = [self._outputs[number] for number in numbers]
        return [*of, *map(call.ports.__getitem__, ported)], [
            *(one for one in come if one is not None),
            *ported.values(),
        ]

    def gradients_in_batches(self, call: Evaluation, tangents: Tangents) -> dict[int, Tensor | None]:
        """See `Evaluation.in_batches`."""
        of, values = self._evaluate(call, tangents)
        again: Any = call.again
        if not all(_same(one, again[i]) for i, ref in call.outputs.items() if (one := ref()) is not None):
            raise NotAgainError("evaluated once more, it has other results")
        wanted = [i for i in self._arguments or [] if i is not None]
        roots, leaves = [again[i] for i in of], [call.given[i] for i in wanted]
        found = torch.autograd.grad(roots, leaves, values, retain_graph=True, allow_unused=True)
        return dict(zip(wanted, found, strict=True))

    def gradients_together(
        self, call: Evaluation, node: Any, tangents: Tangents, failed: Tell
    ) -> dict[int, Tensor | None]:
        """See `Evaluation.together`."""
        try:
            of, values = self._of(call, tangents)
        except NotAgainError as error:
            raise CaptureError(f"gradients of gradients cannot be computed as in eager mode: {error}") from error
        again = call.again or ()
        roots = [again[i] for i in of]
        for one in call.passes:
            for gradient, cotangent in one.now():
                roots.append(gradient)
                values.append(cotangent)
            one.cotangents, one.backward = (), -1
        inside, numbers = _summands(roots[len(of) :]), {i: number for number, i in self._outputs.items()}
        for i, root in zip(of, roots, strict=False):
            added = inside[_edge(root)]
            if not added or added + _added_outside(node, numbers.get(i)) <= 2:
                continue
            failed(
                "gradients that are differentiated come, with others, to what a part of the step returns, and eager mode adds "
                f"them up in another order: {OTHER_BITS}"
            )
        wanted = [i for i in self._arguments or [] if i is not None]
        leaves = [call.given[i] for i in wanted]
        call.backward = backward_number()
        if not roots:
            return {}
        found = torch.autograd.grad(roots, leaves, values, retain_graph=True, allow_unused=True)
        if not graph_is_kept():
            call.again, call.given, call.args = None, (), ()
        return dict(zip(wanted, found, strict=True))

    def _evaluated(self, call: Evaluation, given: Sequence[Any]) -> Sequence[Any]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(outside_of_batches())
            stack.enter_context(torch.random.fork_rng([one for one in call.states if one.type == "cuda"]))
            stack.enter_context(self._around())
            for device, state in call.states.items():
                _set_state(device, state)
            copies = [copied(one) if i in self._written else one for i, one in enumerate(given)]
            outputs: Sequence[Any] = self._plainly(*copies)
        return outputs


def _summands(roots: Sequence[Tensor]) -> Counter[tuple[Any, int]]:
    """How many gradients come to each edge of autograd's graph in a backward of these tensors, beside those of their own."""
    left = [one.grad_fn for one in roots if one.grad_fn is not None]
    seen, found = set(left), Counter[tuple[Any, int]]()
    while left:
        for edge in left.pop().next_functions:
            found[edge] += 1
            if edge[0] is not None and edge[0] not in seen:
                seen.add(edge[0])
                left.append(edge[0])
    return found


def _added_outside(node: Any, number: int | None) -> int:
    """How many gradients are added up at an output of a node in the backward that runs; many, where it is not known."""
    known = sources_of_gradients()
    if known is None or number is None:
        return 2
    return sum(not getattr(one, "adds_nothing", False) for sources in known for one in sources.get((node, number), ()))


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _node(value: Any) -> Any:
    return value.grad_fn if isinstance(value, Tensor) else None


def _edge(value: Tensor) -> tuple[Any, int]:
    edge = get_gradient_edge(value)
    return edge.node, edge.output_nr


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter)


def _apart(args: Sequence[Any]) -> list[Any]:
    """Arguments as leaves of a graph of their own."""
    return _each_once(args, lambda one: one.detach().requires_grad_())


def _linked(args: Sequence[Any]) -> list[Any]:
    """Views of arguments, none of which was computed from another, as autograd sees it."""
    return _each_once(args, lambda one: one.view_as(one))


def _each_once(args: Sequence[Any], make: Callable[[Tensor], Tensor]) -> list[Any]:
    made: dict[int, Tensor] = {}
    return [made.setdefault(id(one), make(one)) if _has_gradient(one) else one for one in args]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num()))


def _state(device: torch.device) -> Any:
    """The state of a random number generator; on the CPU not as a tensor, for which no plan has room."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.default_generator.clone_state()


def _set_state(device: torch.device, state: Any) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state.get_state())
