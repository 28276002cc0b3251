"""A simulated CUDA device: tests that are marked ``gpu`` run on a machine without one, with the CPU's kernels.

    python -m tests.simulated tests/test_gpu.py -k accumulation

What it shows is that code for a GPU runs, on which device each tensor lies, what is allocated, and in which order autograd
goes on in a thread of the device's. It says nothing of CUDA's own kernels (their bits, workspaces and times), of cuDNN, flash
attention, Triton and CUDA graphs, and of what the caching allocator reserves. Those need a GPU.
"""
