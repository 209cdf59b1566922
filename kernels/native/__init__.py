"""Kernels for CPUs, in C++, which the machine's own compiler compiles when they are first needed."""
