"""What kernels for a CPU are made of: vectors and memory for numba, and XLA's foreign function interface."""
