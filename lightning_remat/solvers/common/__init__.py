"""What several families of solvers use.

The problem, and how it is solved:

* ``_problem``: the problem as the solvers see it, and schedules as plain sequences.
* ``_solution``: what `solve` returns.
* ``_registry``: solvers by name, and the one call that runs any of them.
* ``_plugins``: what other packages add under an entry point.
* ``_no_remat``: "no_remat" and "checkpoint_all", every op once.

Schedules:

* ``_rollout``: from a choice of values to keep to a whole schedule.
* ``_segments``: segments of the forward, and the values that cross their ends.
* ``_stages``: schedules in stages, as integer programs see them.
* ``_prune``: what nobody reads is dropped, and what the budget has room for is kept.
* ``_eviction``: what is held at the peak is given up, and computed again.
* ``_lifetimes``: a schedule that is changed step by step, and the memory held meanwhile.
* ``_working_set``: the bytes that an op needs while it runs.

Smaller problems and other solvers:

* ``_coarsen``: fewer, larger nodes.
* ``_coarse_search``: a program solved on a coarsening, and its schedules filled up.
* ``_mip``: the door to the solvers of python-mip.
* ``_mip_process``: the process that they run in.
"""
