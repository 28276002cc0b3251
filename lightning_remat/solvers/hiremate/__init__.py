"""HiRemate (Gusak et al. 2025), and what it is made of: Rotor (Beaumont et al. 2019, 2024) and Rockmate (Zhao et al. 2023).

* ``_hiremate``: "hiremate", partition, solve every distinct block at several budgets, recombine (section 3, figure 1).
* ``_partition``: hierarchies of blocks, by H-Partition and by other partitioners (section 3.1, appendix A).
* ``_isomorphism``: blocks as problems of their own, equal for equal blocks (appendix C.1.1).
* ``_blocks``: the options of a block, and chains of blocks (section 3.2.2).
* ``_rotor``: "rotor", dynamic programming over a chain of blocks (sections 2 and 3.2.1).
* ``_h_ilp``: "h_ilp", an integer program on blocks with options (section 3.2.2, appendix B).
* ``_rk_checkmate``: "rk_checkmate", Rockmate's Checkmate: that program on single ops.
* ``_integer_program``: the program of both (appendix B).

Partitioning, programs and recurrence are the papers'. This project's own are sets of kept values instead of programs
for the lowest blocks ("keep"), the partitioner "chain", chains made of any forward, and the differences that each file
lists.
"""
