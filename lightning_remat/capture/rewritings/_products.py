"""The gradient of a product (``prod``, over one dimension or all) is computed in the way that eager chooses.

Where no factor is zero, eager divides the product by each of them; where one is, it multiplies the others only. It looks at the
values, which a traced graph cannot: torch traces the second way, which rounds otherwise. Here both are computed, one is chosen.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx

from lightning_remat.capture._torch import observed_ops, real_tensors, runs_in_forward
from lightning_remat.errors import CaptureError

aten = torch.ops.aten
Node = torch.fx.Node

_BEFORE = (aten.cumprod.default, aten.cat.default, aten.slice.Tensor)
_AFTER = (aten.flip.default, aten.cumprod.default, aten.cat.default, aten.flip.default, aten.slice.Tensor)


@functools.cache
def _traces_running_products_as_run() -> bool:
    """Whether the gradient of ``cumprod`` is traced in the way that eager mode goes: some releases of torch have two.

    Seen on an example: where operations are observed, eager mode goes the way in which they are traced.
    """
    with real_tensors(), torch.enable_grad():
        x = torch.linspace(0.3, 1.7, 63, device="cpu").sin().view(7, 9).requires_grad_()

        def gradient() -> torch.Tensor:
            product = x.cumprod(0)
            return torch.autograd.grad((product * product.detach().cos()).sum(), x)[0]

        with observed_ops(lambda _op, _args, _kwargs, _number, run: run()):
            observed = gradient()
        return torch.equal(gradient(), observed)


def choose_gradients_of_products(graph: torch.fx.Graph) -> None:
    """Put eager's choice in the place of the gradient of each product.

    Raises:
        CaptureError: where it is differentiated again, or of complex numbers, or of factors that lie transposed or with gaps;
            and where a running product's gradient goes another way than torch traces.
    """
    running = [n for n in graph.find_nodes(op="call_function", target=aten.cumprod.default) if runs_in_forward(n)]
    if running and not _traces_running_products_as_run():
        numbers = {node.meta.get("seq_nr") for node in graph.nodes if not runs_in_forward(node)}
        for one in running:
            if one.meta.get("seq_nr") in numbers:
                raise CaptureError(
                    f"this release of torch computes the gradient of {one.name} otherwise than it traces it"
                )
    ops = (aten.prod.default, aten.prod.dim_int)
    products = [node for op in ops for node in graph.find_nodes(op="call_function", target=op)]
    for others in graph.find_nodes(op="call_function", target=aten.mul.Tensor) if products else ():
        before, after = (_under(factor, ops) for factor, ops in zip(others.args, (_BEFORE, _AFTER), strict=True))
        if before is None or before is not after:
            continue
        sources = [before]  # what the backward has made of the product's input, and that
        while sources[-1].target in (aten.view.default, aten.clone.default, aten._to_copy.default):
            sources.append(sources[-1].args[0])  # type: ignore[arg-type]
        again = runs_in_forward(others)
        for product in products:
            if product.args[0] in sources and (again or product.meta.get("seq_nr") == others.meta.get("seq_nr")):
                made = sources[: sources.index(product.args[0])]
                laid = before.meta["val"].is_contiguous() and all(one.target is not aten.clone.default for one in made)
                reasons = {
                    "it is differentiated again": again,
                    "its factors are complex": before.meta["val"].is_complex(),
                    "its factors have gaps between them, or are transposed: x.contiguous().prod(...) is captured": not laid,
                    "what comes before and after each factor is read several times": len(others.users) > 1,
                }
                for why in (reason for reason, holds in reasons.items() if holds):
                    raise CaptureError(
                        f"it cannot be told in which way eager mode computes the gradient of {product.name}: {why}"
                    )
                _choose(graph, product, before, next(iter(others.users)))


def _under(node: Any, ops: tuple[Any, ...]) -> Node | None:
    """What these ops, the last of them first, are computed of."""
    for op in ops:
        if not isinstance(node, Node) or node.target is not op:
            return None
        node = node.args[0][-1] if op is aten.cat.default else node.args[0]  # type: ignore[index]
    return node  # type: ignore[no-any-return]


def _choose(graph: torch.fx.Graph, product: Node, factors: Node, traced: Node) -> None:
    """Choose between the gradient as it was traced, and the other one, by whether a factor is zero.

    Of all elements' product, the gradient is zero where several of them are.
    """
    meta = {key: item for key, item in traced.meta.items() if key not in ("val", "tensor_meta")}
    value, result = factors.meta["val"], traced.meta["val"]

    def call(op: Any, *args: Any, val: torch.Tensor) -> Node:
        node = graph.call_function(op, args)
        node.meta = {**meta, "val": val}
        return node

    with graph.inserting_before(traced.next):
        zeros = call(aten.eq.Scalar, factors, 0, val=torch.empty_like(value, dtype=torch.bool))
        count = call(aten.sum.default, zeros, val=value.new_empty((), dtype=torch.int64))
        some, several = (call(aten.gt.Scalar, count, n, val=value.new_empty((), dtype=torch.bool)) for n in (0, 1))
        whole, slow = product, traced
        if product.target is aten.prod.default:
            slow = call(aten.masked_fill.Scalar, traced, several, 0, val=result)
        elif product.meta["val"].dim() < value.dim():
            dim: int = product.args[1]  # type: ignore[assignment]
            whole = call(aten.unsqueeze.default, product, dim, val=product.meta["val"].unsqueeze(dim))
        share = call(aten.div.Tensor, whole, factors, val=torch.empty_like(value))
        fast = call(aten.mul.Tensor, traced.args[0], share, val=result)
        chosen = call(aten.where.self, some, slow, fast, val=result)
    traced.replace_all_uses_with(chosen, delete_user_cb=lambda user: user not in (slow, chosen))
