"""The hooks by which transformers records hidden states and attentions: it installs them in the first call that asks for these.

That is under a lock, which Dynamo leaves to Python, and the graph would break in the middle of the model. They are installed
while that call is traced: before the model runs, as in eager mode.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from lightning_remat._replaced import replaced
from lightning_remat.capture._torch import UserFunctionVariable, VariableTracker

_LIBRARY = "transformers.utils.output_capturing"
_INSTALL = "maybe_install_capturing_hooks"


@contextlib.contextmanager
def recording_is_installed() -> Iterator[None]:
    """While Dynamo traces: where hooks that record outputs would be installed, they are."""
    library = sys.modules.get(_LIBRARY)
    install = getattr(library, _INSTALL, None)
    if install is None:
        yield
        return
    own = UserFunctionVariable.call_function

    def call_function(self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        model = (
            getattr(args[0].realize(), "value", None) if self.fn is install and len(args) == 1 and not kwargs else None
        )
        if not isinstance(model, torch.nn.Module):
            return own(self, translator, args, kwargs)
        install(model)
        return VariableTracker.build(translator, None)

    with replaced(((UserFunctionVariable, "call_function", call_function),)):
        yield
