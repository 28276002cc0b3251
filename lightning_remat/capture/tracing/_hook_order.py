"""Hooks of one tensor run in the order in which they were registered.

torch 2.11 captures a hook as a function that the tensor goes through, and lets it go through the next hook's after
that: the backward comes to the last hook first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning_remat.capture._torch import TensorVariable


@contextlib.contextmanager
def hooks_in_order() -> Iterator[None]:
    """While Dynamo traces: where hooks become nodes of the graph, later ones are put before earlier ones."""
    own = TensorVariable.method_register_hook
    without: dict[Any, Any] = {}
    """By the node of a tensor that has hooks, the proxy that the tensor had without them."""

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
