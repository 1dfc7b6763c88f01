"""The tensors of the KV cache: keys and values per layer, [slots, key heads, width, head size].

A slot is contiguous. Copies, swaps and sizes are what `slot_allocator` orders.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from mars_ray.engine.kv.attention import Layers
from mars_ray.engine.kv.slot_allocator import CacheOp, Copy, Resize, Swap


def kv_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return layers, key heads and head size."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers, heads, size


def bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return how many bytes one token takes. Qwen2.5-7B in bf16: 2 x 28 layers x 4 heads x 128 x 2 B = 57 kB."""
    layers, heads, size = kv_shape(config)
    return 2 * layers * heads * size * dtype.itemsize


class SlotKVCache:
    """Keys and values of all slots. Has no slot before the first `Resize`."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = kv_shape(config), dtype, device
        self.layers: Layers = []
        self.resize(0, 0)

    @torch.inference_mode()
    def apply(self, operations: Sequence[CacheOp]) -> None:
        """Carry out `operations` in order."""
        for operation in operations:
            match operation:
                case Copy(source, target, length):
                    torch._foreach_copy_(self._part(target, length), self._part(source, length))
                case Swap(one, other, length):
                    kept = [part.clone() for part in self._part(one, length)]
                    torch._foreach_copy_(self._part(one, length), self._part(other, length))
                    torch._foreach_copy_(self._part(other, length), kept)
                case Resize(slots, width):
                    self.resize(slots, width)

    def _part(self, slot: int, length: int) -> list[Tensor]:
        return [each[slot, :, :length] for layer in self.layers for each in layer]

    @torch.inference_mode()
    def resize(self, slots: int, width: int) -> None:
        """Make the slots so many and so wide; what fits of the first slots stays."""
        count, heads, size = self._shape
        old = self.layers
        # A second slot and one more column than asked for: a compiled step takes any number of rows but 1, and reads
        # a part of a slot, never a whole one. Zeros, for what a filler position reads must be a number.
        shape = (max(slots, 2), heads, width + 1, size)
        self.layers = []
        for layer in range(count):
            keys, values = (torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in range(2))
            if old:
                rows_kept, width_kept = min(slots, old[layer][0].shape[0]), min(width, old[layer][0].shape[2])
                for new, former in zip((keys, values), old[layer], strict=True):
                    new[:rows_kept, :, :width_kept] = former[:rows_kept, :, :width_kept]
            self.layers.append((keys, values))
            if old:
                old[layer] = (keys, values)  # frees the former tensors layer by layer: both at once may not fit
