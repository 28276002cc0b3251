"""Host memory as a third choice: a tensor waits there, copied beside the ops, instead of being kept or computed again.

* ``_rewriting``: the problem with some tensors on the host as one that every solver takes; ``_beginnings``: schedules of it.
* ``_sending``, ``_fetching``, ``_placing``: when copies begin and end.
* ``_program``: a linear program that says what to copy, and bounds the time of all schedules with copies.
* ``_search``: trials around what it says; ``_solve``, ``_smallest_peak``: the calls that run all.
"""
