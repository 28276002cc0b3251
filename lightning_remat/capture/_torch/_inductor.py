"""Inductor for small graphs of ops: compiled callables on tensors of known shapes, without guards.

* ``compile_fx_inner`` is Inductor below Dynamo and AOTAutograd; ``select_decomp_table`` has what its graphs are not made of.
  A compiled graph's ``current_callable`` takes a list of tensors, and checks nothing.
* ``AsyncCompile.wait``: kernels are made in other processes, and those of one graph while the code of others is written.
* ``TracingContext`` and ``tracing``: a graph is compiled while another one is captured, with fake tensors of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
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


@dataclasses.dataclass(frozen=True)
class Uncompiled:
    """What is compiled.

    Attributes:
        function: a function of tensors; it may write to its arguments.
        inputs: makes arguments of it, of which only shapes, strides, dtypes and devices matter.
    """

    function: Callable[..., Any]
    inputs: Callable[[], Sequence[torch.Tensor]]


Compiled = Callable[[list[torch.Tensor]], Any]
"""A compiled function: takes its arguments in a list and empties it."""


def compile_all(sources: Sequence[Uncompiled], *, exact: bool) -> list[Compiled | Exception]:
    """Compile functions, whose kernels are made beside each other.

    Args:
        sources: the functions.
        exact: whether arithmetic is to round as in eager mode.

    Returns:
        Of each the compiled function, or whatever Inductor, or the compiler that it calls, has raised.
    """
    settings = {name: value for name, value in _EXACT.items() if exact and _has(name)}
    found: list[Compiled | Exception] = []
    with (
        _disable_current_modes(),
        torch.no_grad(),
        inductor_config.patch(settings),
        warnings.catch_warnings(
            action="ignore"
        ),  # they are about the code that is made, and nothing that a user can change
    ):
        waiting: list[Callable[[], None]] = []
        for source in sources:
            try:
                with _not_waiting() as wait:
                    found.append(_compiled(source))
                waiting.append(wait)
            except Exception as error:  # noqa: BLE001 - it is the result
                found.append(error)
                waiting.append(lambda: None)
        for number, wait in enumerate(waiting):
            try:
                wait()
            except Exception as error:  # noqa: BLE001 - it is the result
                found[number] = error
    return found


def _compiled(source: Uncompiled) -> Compiled:
    from torch._inductor.compile_fx import compile_fx_inner  # here, since importing it takes most of a second
    from torch._inductor.decomposition import select_decomp_table

    mode = FakeTensorMode()
    with tracing_context(TracingContext(mode)):
        with mode:
            fakes = list(source.inputs())
            module = make_fx(source.function, decomposition_table=select_decomp_table())(*fakes)
        compiled: Any = compile_fx_inner(module, fakes)
    call: Compiled = compiled.current_callable
    return call


@contextlib.contextmanager
def _not_waiting() -> Iterator[Callable[[], None]]:
    """While open, compiled code does not wait for its kernels; what it gives does, and must be called before the code is."""
    from torch._inductor.async_compile import AsyncCompile

    own: Any = AsyncCompile.wait
    left: list[tuple[AsyncCompile, dict[str, Any]]] = []
    thread = threading.get_ident()

    def note(compiler: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            left.append((compiler, scope))
        else:  # another thread compiles something else
            own(compiler, scope)

    AsyncCompile.wait = note

    def wait() -> None:
        for compiler, scope in left:
            own(compiler, scope)

    try:
        yield wait
    finally:
        AsyncCompile.wait = own


def _has(name: str) -> bool:
    owner: Any = inductor_config
    for part in name.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True
