"""The greedy of the XLA compiler, as Kumar et al. 2019 describe it (GreedyRemat, a baseline of section 4).

* ``_greedy_xla``: "greedy_xla". The rule is the compiler's; what the paper leaves open, and how it is settled here, the
  file says.
"""
