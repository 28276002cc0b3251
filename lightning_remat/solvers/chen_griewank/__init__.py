"""Checkpoints on a chain, extended to any graph.

* ``_chen``: "chen_sqrt" and "chen_greedy", Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", sections 4.1
  and 4.3.
* ``_griewank``: "griewank_logn", REVOLVE (Griewank and Walther 2000).

The choice of checkpoints on a chain is the papers'. That nodes are taken in the captured order, and that all values
which cross a checkpoint are kept, is this project's way to any graph.
"""
