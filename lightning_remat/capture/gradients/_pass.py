"""Gradients that were computed once more: one node of autograd's graph, and what comes back to it (see ``_differentiated``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_remat.capture._torch import backward_number, is_to_run

Tensor = torch.Tensor


@dataclasses.dataclass
class Pass:
    """Gradients that were computed once more, in one backward.

    Attributes:
        gradients: those that have a graph.
        tangents: what they were computed from: gradients of the outputs, apart from those that autograd knows.
        cotangents: the gradients of ``gradients``, in the last backward that has come to them.
        backward: number of that backward.
    """

    gradients: list[Tensor]
    tangents: list[Tensor]
    cotangents: Sequence[Tensor | None] = ()
    backward: int = -1

    def now(self) -> Sequence[tuple[Tensor, Tensor]]:
        """The gradients to which the backward that runs has come, each with its own."""
        if self.backward != backward_number():
            return []
        pairs = zip(self.gradients, self.cotangents, strict=True)
        return [(gradient, cotangent) for gradient, cotangent in pairs if cotangent is not None]


class Gradients(torch.autograd.Function):
    """Hands on gradients that were computed once more, as one node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        one_pass: Pass,
        call: Any,
        node: Any,
        apart: Callable[..., Any],
        linked: Callable[..., Any],
        _anchor: Tensor | None,
        *values: Tensor,
    ) -> tuple[Tensor, ...]:
        """The gradients.

        Args:
            ctx: autograd's.
            one_pass: what was computed.
            call: the `Evaluation` of the graph whose gradients these are.
            node: its node in autograd's graph.
            apart: computes the gradients of ``values``, where the node does not.
            linked: likewise, where they are to be differentiated themselves.
            _anchor: what the call returned, if it is still there: in a backward the node comes after this one then.
            values: what the gradients depend on: tangents, and arguments of the graph.
        """
        ctx.set_materialize_grads(False)
        ctx.adds_nothing = True  # to gradients of arguments, where the node does (see `adds_elsewhere`)
        ctx.one_pass, ctx.call, ctx.node = one_pass, call, node
        ctx.apart, ctx.linked, ctx.rest = apart, linked, len(values) - len(one_pass.tangents)
        return tuple(one.detach() for one in one_pass.gradients)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        none = None, None, None, None, None, None
        if torch.is_grad_enabled():
            return *none, *uncaptured(ctx.linked)(cotangents)
        late = ctx.call.backward == backward_number()
        if late or not is_to_run(ctx.node):
            return *none, *uncaptured(ctx.apart)(cotangents, late)
        ctx.one_pass.cotangents, ctx.one_pass.backward = cotangents, backward_number()
        found = uncaptured(gradients_of)(ctx.one_pass.gradients, ctx.one_pass.tangents, cotangents)
        return *none, *found, *[None] * ctx.rest


def gradients_of(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], values: Sequence[Tensor | None], *, create_graph: bool = False
) -> list[Tensor | None]:
    """Gradients of those inputs that have any, where ``values`` are those of the outputs."""
    given = [(output, value) for output, value in zip(outputs, values, strict=True) if value is not None]
    wanted = [one for one in inputs if one.requires_grad]
    if not given or not wanted:
        return [None] * len(inputs)
    roots, cotangents = zip(*given, strict=True)
    found = iter(
        torch.autograd.grad(roots, wanted, cotangents, retain_graph=True, create_graph=create_graph, allow_unused=True)
    )
    return [next(found) if one.requires_grad else None for one in inputs]


def uncaptured(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of which Dynamo captures nothing: the backward may be called by a step that it captures."""
    disable: Any = torch.compiler.disable
    found: Callable[..., Any] = disable(function)
    return found
