"""What several families of solvers use.

The problem, and how it is solved:

* ``_problem``: the problem as the solvers see it, and schedules as plain sequences.
* ``_solution``: what `solve` returns.
* ``_registry``: solvers by name, and the one call that runs any of them.
* ``_plugins``: what other packages add under an entry point.
* ``_no_remat``: "no_remat" and "checkpoint_all", every op once.

Schedules:

* ``_rollout``: from a choice of values to keep to a whole schedule.
* ``_prune``: what nobody reads is dropped, and what the budget has room for is kept.
* ``_lifetimes``: a schedule that is changed step by step, and the memory held meanwhile.

Smaller problems and other solvers:

* ``_coarsen``: fewer, larger nodes.
* ``_coarse_search``: a program solved on a coarsening, and its schedules filled up.
* ``_mip``: the door to the solvers of python-mip.
* ``_mip_process``: the process that they run in.
"""
