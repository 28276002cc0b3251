"""Hooks of one tensor run in the order in which they were registered.

torch 2.11 captures a hook as a function that the tensor is put through, and puts it through the next one after that: the
backward comes to the last one first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning_remat.capture._torch import TensorVariable


@contextlib.contextmanager
def hooks_in_order() -> Iterator[None]:
    """While Dynamo traces: where a hook gives a tensor another node, later hooks come before it in the graph."""
    own = TensorVariable.method_register_hook
    without: dict[Any, Any] = {}
    """For the node of a tensor that has hooks, the proxy that it had before."""

    def register(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        hooked = self.proxy
        first = self.proxy = without.get(hooked.node, hooked)
        try:
            handle = own(self, tx, *args, **kwargs)
        except BaseException:
            self.proxy = hooked
            raise
        if self.proxy.node is not first.node:
            if hooked is first:
                without[self.proxy.node] = first
            else:
                self.proxy = hooked
        return handle

    TensorVariable.method_register_hook = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        TensorVariable.method_register_hook = own  # type: ignore[method-assign]
