"""Jain et al. 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization": integer programs.

Sections and equations are those of the MLSys version.

* ``_integer_program``: the mixed integer linear program, eq. 9 in section 4.7.
* ``_milp``: "milp", that program, on a coarsening where the problem is large.
* ``_milp_unpartitioned``: "checkmate_unpartitioned", the program without frontier-advancing stages (sections 4.3 to
  4.5; compared with the other in section 4.6 and appendix A).
* ``_lp_rounding``: "lp_rounding", its relaxation, rounded (section 5, appendix D).
* ``_generalized_chen``: "ap_sqrt", "ap_greedy", "linearized_sqrt" and "linearized_greedy", Chen et al.'s checkpoints on any
  graph (section 6.1, appendix B).

The largest batch size (section 6.4) can be found with any method, in `lightning_remat.solvers.portfolio`. Of the
paper's baselines, "chen_sqrt", "chen_greedy" and "griewank_logn" are in `lightning_remat.solvers.chen_griewank`.

The programs, the rounding and the choice of checkpoints are the paper's. This project's own are the differences that
each file lists, the coarsening, and spending what a budget has left (`keep_longer`).
"""
