"""The greedy of the XLA compiler, as Kumar et al. 2019 describe it (GreedyRemat, a baseline of section 4).

* ``_greedy_xla``: "greedy_xla".
"""
