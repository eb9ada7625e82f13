"""Kernels: of triton for a GPU, in C++ for a CPU. The only room that imports triton. Each has a plain function of torch beside it in the tests."""
