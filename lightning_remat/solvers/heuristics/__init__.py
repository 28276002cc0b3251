"""This project's heuristics: none proves a bound of its own.

* ``_greedy``: "greedy", block boundaries kept, and the rest chosen by time saved a byte.
* ``_descent``: "descent", from schedules that hold too much down to the budget.
* ``_large_neighbourhood_search``: a schedule improved by many small random changes.
* ``_reorder``: the backward in another order, which peaks lower.
"""
