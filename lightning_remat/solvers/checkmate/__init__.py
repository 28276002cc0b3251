"""Checkmate (Jain et al. 2020); sections and equations as in the MLSys version.

* ``_integer_program``: the mixed integer linear program, eq. 9 in section 4.7.
* ``_milp``: "milp", that program, on a coarsening where the problem is large.
* ``_milp_unpartitioned``: "checkmate_unpartitioned", the program without frontier-advancing stages (sections 4.3 to 4.6,
  appendix A).
* ``_lp_rounding``: "lp_rounding", its relaxation, rounded (section 5, appendix D).
* ``_generalized_chen``: "ap_sqrt", "ap_greedy", "linearized_sqrt" and "linearized_greedy", Chen et al.'s checkpoints on any
  graph (section 6.1, appendix B).

The largest batch size (section 6.4) is asked of any method, in `lightning_remat.solvers.portfolio`. Of the paper's baselines,
"chen_sqrt", "chen_greedy" and "griewank_logn" are in `lightning_remat.solvers.chen_griewank`.
"""
