"""The KV cache: slot allocation, tensors, and attention over them."""
