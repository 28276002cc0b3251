"""Constraint programming with a few retention intervals for each node.

Bartan, Li, Teague, Lott and Dilkina 2023, "Moccasin: Efficient Tensor Rematerialization for Neural Networks".

* ``_moccasin``: "moccasin", by OR-Tools CP-SAT in a process of its own.
* ``_constraint_program``: the program, with retention intervals.

The model is the paper's, from its description. This project's own are values, workspaces and the boundary in it, the
coarsening, and spending what a budget has left.
"""
