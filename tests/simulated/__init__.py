"""A simulated CUDA device: tests that are marked ``gpu`` run on a machine without one, with the CPU's kernels.

    python -m tests.simulated tests/test_gpu.py -k accumulation

What it shows is that code for a GPU runs, on which device each tensor lies, what is allocated, in which order autograd goes on
in a thread of the device's, and that a recorded graph does when it is replayed what was recorded. It says nothing of CUDA's own
kernels (their bits, layouts and times), of cuDNN, flash attention and Triton, and of what the caching allocator reserves. Those
need a GPU.
"""
