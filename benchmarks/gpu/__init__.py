"""Everything that can only be shown on a GPU, shown by one command: ``benchmarks/gpu.sh``.

A part is a file: `gpu_tests`, `bits`, `out_of_memory`, `trainer`, `peaks`, `host_memory`, `recordings`, `beside_compiler`,
`batch_size`. It lists cases, and runs one in a process that may die or hang (`worker`), which the suite (`workers`) survives.
Each result is written when it is there (`results`), so that a run may be stopped at any moment and goes on where it was.
`table` makes one page of them.
"""
