"""Dynamic programming over the lower sets of the forward graph.

Kusumoto et al. 2019, "A Graph Theoretic Framework of Recomputation Algorithms for Memory-Efficient Backpropagation".

* ``_dynamic_programming``: "exact_dp" and "approx_dp", over lower sets (section 4, Algorithm 1).
* ``_lower_sets``: lower sets, and the recomputation strategies that they stand for (sections 2, 3 and 4.3).

Lower sets, strategies and dynamic programming are the paper's, on the forward graph. This project's own are how a
strategy becomes a schedule of the joint graph, the search over the memory that the paper's model is given, and counting
lower sets.
"""
