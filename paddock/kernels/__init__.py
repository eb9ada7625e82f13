"""Kernels: of triton for a GPU, in C++ for a CPU. The only room that imports triton; tests hold each to plain torch."""
