"""Kernels: triton for a GPU, C++ for a CPU. Only this package imports triton; tests compare them with plain torch."""
