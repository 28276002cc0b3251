"""Which function computes the divergence of two distributions, found before a step that asks is captured.

* ``_dispatch_kl``: looks for it in ``_KL_REGISTRY``, in a way that Dynamo leaves to Python, and once for all: ``_KL_MEMOIZE``
  has what was found. A step in which it is asked first would stay in parts.
"""

from __future__ import annotations

from torch.distributions import kl


def find_divergences() -> None:
    """Look for the functions of all pairs of distributions that torch or the user has registered, as a first call would."""
    for pair in set(kl._KL_REGISTRY) - set(kl._KL_MEMOIZE):
        kl._KL_MEMOIZE[pair] = kl._dispatch_kl(*pair)  # type: ignore[no-untyped-call]
