"""Inductor for one small graph of ops: a compiled callable on tensors of known shapes, without guards.

* ``compile_fx_inner`` is Inductor below Dynamo and AOTAutograd; ``select_decomp_table`` has what its graphs are not made of.
  A compiled graph's ``current_callable`` takes a list of tensors, and checks nothing.
* ``TracingContext`` and ``tracing``: a graph is compiled while another one is captured, with fake tensors of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._guards import TracingContext
from torch._guards import tracing as tracing_context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

cast = torch.ops.prims.convert_element_type.default
"""A cast that stays one where it is undone right away: it rounds."""

_EXACT = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "eager_numerics.use_pytorch_libdevice": True,
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    "use_fast_math": False,
}
"""Settings by which compiled arithmetic rounds as eager's; those that a release of torch does not have are left out."""


def compile_ops(
    function: Callable[..., Any], inputs: Callable[[], Sequence[torch.Tensor]], *, exact: bool
) -> Callable[[list[torch.Tensor]], Any]:
    """Compile a function of tensors.

    Args:
        function: what is compiled; it may write to its arguments.
        inputs: makes arguments of it, of which only shapes, strides, dtypes and devices matter.
        exact: whether arithmetic is to round as in eager mode.

    Returns:
        The compiled function, which takes its arguments in a list and empties it.

    Raises:
        Exception: whatever Inductor, or the compiler that it calls, raises.
    """
    from torch._inductor.compile_fx import compile_fx_inner  # here, since importing it takes most of a second
    from torch._inductor.decomposition import select_decomp_table

    settings = {name: value for name, value in _EXACT.items() if exact and _has(name)}
    mode = FakeTensorMode()
    with (
        _disable_current_modes(),
        tracing_context(TracingContext(mode)),
        torch.no_grad(),
        inductor_config.patch(settings),
        warnings.catch_warnings(
            action="ignore"
        ),  # they are about the code that is made, and nothing that a user can change
    ):
        with mode:
            fakes = list(inputs())
            module = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
        compiled: Any = compile_fx_inner(module, fakes)
    call: Callable[[list[torch.Tensor]], Any] = compiled.current_callable
    return call


def _has(name: str) -> bool:
    owner: Any = inductor_config
    for part in name.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True
