"""What several folders of solvers use: this project's own, but for what a file says is from a paper.

The problem, and how it is solved:

* ``_problem``: the problem as the solvers see it, and schedules as plain sequences.
* ``_solution``: what `solve` returns.
* ``_registry``: solvers by name, and the one call that runs any of them.
* ``_plugins``: what other packages add under an entry point.
* ``_clock``: the clock that all solvers stop by, of seconds or of counted work.
* ``_no_remat``: "no_remat" and "checkpoint_all", every op once.

Schedules:

* ``_rollout``: from a choice of values to keep to a whole schedule.
* ``_segments``: segments of the forward, and the values that cross their ends.
* ``_stages``: schedules in stages, as integer programs see them.
* ``_prune``: unread evaluations are dropped, and repeated ones that the budget has room to avoid.
* ``_eviction``: values held at the peak are given up, and computed again.
* ``_lifetimes``: a schedule under local changes, with the memory held kept up to date.
* ``_working_set``: the bytes that an op needs while it runs.

Smaller problems and other solvers:

* ``_coarsen``: fewer, larger nodes.
* ``_coarse_search``: a program solved on a coarsening, and what budget is left spent on the fine problem.
* ``_mip``: programs for python-mip's solvers, built here and solved in a process of their own.
* ``_mip_process``: that process.
"""
