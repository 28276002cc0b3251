"""Checkpoints on a chain, carried over to any graph.

* ``_chen``: "chen_sqrt" and "chen_greedy", Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", sections 4.1
  and 4.3.
* ``_griewank``: "griewank_logn", REVOLVE (Griewank and Walther 2000).
"""
