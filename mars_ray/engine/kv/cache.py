"""The tensors of the KV cache: keys and values of each layer, as [slots, key heads, width, head size].

Each slot is contiguous. `slot_allocator` decides when slots are copied or resized.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from mars_ray.engine.kv.attention import Layers
from mars_ray.engine.kv.slot_allocator import CacheOp, Copy, Resize


def kv_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return the number of layers, the number of key heads, and the head size."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers, heads, size


def bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the size of one token in bytes. Qwen2.5-7B in bf16 takes 2 x 28 layers x 4 heads x 128 x 2 B = 57 kB."""
    layers, heads, size = kv_shape(config)
    return 2 * layers * heads * size * dtype.itemsize


class SlotKVCache:
    """Keys and values of all slots. The cache has no slots before the first `Resize`."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = kv_shape(config)
        self._dtype = dtype
        self._device = device
        self.layers: Layers = []
        self.resize(0, 0)

    @torch.inference_mode()
    def apply(self, operations: Sequence[CacheOp]) -> None:
        """Carry out `operations` in order."""
        for operation in operations:
            match operation:
                case Copy(source, target, length):
                    torch._foreach_copy_(self._part(target, length), self._part(source, length))
                case Resize(slots, width):
                    self.resize(slots, width)

    def _part(self, slot: int, length: int) -> list[Tensor]:
        return [tensor[slot, :, :length] for layer in self.layers for tensor in layer]

    @torch.inference_mode()
    def resize(self, slots: int, width: int) -> None:
        """Resize the cache to `slots` slots of `width` columns, keeping the content of the first slots that fits."""
        count, heads, size = self._shape
        old = self.layers
        self.layers = []
        for layer in range(count):
            # Attention multiplies hidden columns by 0, so they must hold finite numbers.
            shape = (slots, heads, width, size)
            keys, values = (torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in range(2))
            if layer < len(old):  # an earlier resize for which memory was short leaves fewer layers
                rows_kept = min(slots, old[layer][0].shape[0])
                width_kept = min(width, old[layer][0].shape[2])
                for new, source in zip((keys, values), old[layer], strict=True):
                    new[:rows_kept, :, :width_kept] = source[:rows_kept, :, :width_kept]
                old[layer] = (keys, values)  # frees each old layer at once, because both caches may not fit into memory
            self.layers.append((keys, values))
