"""Questions that are put to several methods at once, of any folder: this project's own, but for ``_batch_size``.

* ``_auto``: "auto", the cheapest schedule within a budget, and a bound beside.
* ``_smallest_peak``: the smallest peak.
* ``_curve``: the whole trade-off between memory and time, from the smallest peak to no rematerialization.
* ``_batch_size``: the largest batch size by bisection, with any method (Checkmate, Jain et al. 2020, section 6.4).
* ``_largest_batch``: the largest batch size in few solves.
"""
