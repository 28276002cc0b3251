"""Bartan, Li, Teague, Lott and Dilkina 2023, "Moccasin: Efficient Tensor Rematerialization for Neural Networks".

* ``_moccasin``: "moccasin", by OR-Tools CP-SAT in a process of its own.
* ``_constraint_program``: the program, with retention intervals.
"""
