"""Kumar et al. 2019, "Efficient Rematerialization for Deep Networks": tree and path decompositions.

* ``_treewidth``: "treewidth", by tree decomposition (section 3, Algorithm 1; section 4.3).
* ``_pathwidth``: "pathwidth", by path decomposition (section 5, appendix A, Algorithms 2 and 3).
* ``_tree_decomposition``: the decompositions themselves, by heuristics (sections 2.2, 3 and 5).

The paper's baseline from XLA (section 4) is in `lightning_remat.solvers.xla`.

The algorithms are the paper's. This project's own are the node that stands for the boundary, the repair of orders in
which random nodes would run too late, the heuristics for path decompositions, and spending what a budget has left.
"""
