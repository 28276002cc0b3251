"""How a run's ops are written for the compiler, so that each element is rounded where eager mode rounds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from lightning_remat.capture import _ops
from lightning_remat.capture._torch import cast
from lightning_remat.capture.fusing._rules import HALVES

aten = torch.ops.aten


class Written(torch.fx.Interpreter):
    """Runs a program's ops in the forms that are compiled.

    Args:
        program: the ops.
        rounded: whether those in less than single precision are each computed in single precision, and rounded.
    """

    def __init__(self, program: torch.fx.GraphModule, rounded: bool) -> None:
        super().__init__(program)
        self.rounded = rounded

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Any = FORMS.get(n.target, n.target)
        if not self.rounded or _ops.is_view(n.target) or n.target in _AS_IT_IS:
            return target(*args, **kwargs)
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), _single)
        result, dtype = target(*args, **kwargs), n.meta["val"].dtype
        return cast(result, dtype) if dtype in HALVES else result


_AS_IT_IS = (
    aten._to_copy.default,
    aten.clone.default,
    aten.full.default,
    aten.scalar_tensor.default,
    _ops.dropout_noise,
)


def _single(value: Any) -> Any:
    return cast(value, torch.float32) if isinstance(value, torch.Tensor) and value.dtype in HALVES else value


def _clamp(x: torch.Tensor, low: float | None = None, high: float | None = None) -> torch.Tensor:
    """As torch's kernels: compiled, a minimum of zeros would be one of them, and not always the same."""
    if low is not None:
        x = aten.where.ScalarSelf(aten.lt.Scalar(x, low), low, x)
    return x if high is None else aten.where.ScalarSelf(aten.gt.Scalar(x, high), high, x)


def _hardtanh(x: torch.Tensor, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
    return _clamp(x, low, high)


def _clamp_max(x: torch.Tensor, high: float) -> torch.Tensor:
    return _clamp(x, None, high)


def _all(x: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
    """Of booleans: that none is false. Ones add up exactly in any order, up to `MOST_COUNTED`."""
    found: torch.Tensor = aten.sum.dim_IntList(cast(aten.logical_not.default(x), torch.float32), [dim], keepdim)
    return found == 0


def _noise(mask: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """`dropout_noise`, of ops that write nothing in place."""
    return aten.where.ScalarOther(mask, torch.full((), scale, dtype=dtype, device=mask.device), 0.0)  # type: ignore[no-any-return]


FORMS: dict[Any, Callable[..., Any]] = {
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: _clamp_max,
    aten.hardtanh.default: _hardtanh,
    aten.all.dim: _all,
    _ops.dropout_noise: _noise,
}
"""Functions of other ops with the same bits, for ops that compiled code would compute otherwise, or not at all."""
