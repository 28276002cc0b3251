"""This project's bounds on the time of any schedule within a budget, in any order, and schedules that are near them.

Every schedule passes certain moments, and what it holds there fits the budget.

* ``_minimum_cut``: "crossing", the moment between forward and backward.
* ``_binding_moments``: "moments", with the few other moments at which the budget binds.
* ``_linear_program``: the program of both.
"""
