"""Triton kernels: the only room that imports triton. Each has a plain function of torch beside it in the tests."""
