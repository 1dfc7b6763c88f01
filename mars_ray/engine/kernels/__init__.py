"""The step of the engine on a CPU as compiled kernels: packed weights, and a whole decoder in one call."""
