"""Kumar et al. 2019, "Efficient Rematerialization for Deep Networks".

* ``_treewidth``: "treewidth", by tree decomposition (section 3, Algorithm 1).
* ``_pathwidth``: "pathwidth", by path decomposition (section 5, appendix A, Algorithms 2 and 3).
* ``_tree_decomposition``: the decompositions themselves, by heuristics (sections 2.2, 3 and 5).

The paper's baseline from XLA (section 4) is in `lightning_remat.solvers.xla`.
"""
