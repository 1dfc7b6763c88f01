"""The KV cache: who owns which slot, the tensors, and attention over them."""
