"""The rule of a step as Triton kernels."""
