"""CPU kernels in C++, compiled on the user's machine when they are first needed."""
