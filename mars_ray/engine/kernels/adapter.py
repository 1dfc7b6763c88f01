"""Pack an adapter for the decoder kernels: mask embeddings, and low-rank factors of the layers that read together.

Factors have 8 bits unless the base model is in float32. They act at masks only, and drafts are verified, so rounding
them changes speed and never answers in exact mode.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.engine.kernels.build import WeightLayout
from mars_ray.engine.kernels.packed import Format, Matrix, pack_weight


class _LowRank(ctypes.Structure):
    _fields_ = (("down", Matrix), ("up", Matrix * 3), ("parts", ctypes.c_int64))


class AdapterStruct(ctypes.Structure):
    """The struct `Adapter` of `structures.h`."""

    _fields_ = (("mask_embedding", ctypes.c_void_p), ("pairs", ctypes.c_void_p), ("ranks", ctypes.c_int64))


@dataclass(slots=True, eq=False)
class FusedLoRA:
    """The packed weights of an adapter, without its sampler head."""

    masks: int
    """Number of mask embeddings."""
    structure: AdapterStruct = field(init=False)
    tensors: list[Tensor] = field(default_factory=list)
    """Tensors that own the memory that the structure points into."""
    pairs: Any = None
    """Array that the structure points into."""

    @property
    def nbytes(self) -> int:
        """Memory of the weights in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)


class AdapterPacker:
    """Packs adapters of the decoder `body`, whose groups of linear layers are `together`.

    Factors are packed as `kind` for the kernels' `layout`, after they are rounded to `dtype`.
    """

    def __init__(
        self, body: Any, together: Sequence[tuple[str, ...]], kind: Format, dtype: torch.dtype, layout: WeightLayout
    ) -> None:
        self._body = body
        self._together = together
        self._kind = kind
        self._dtype = dtype
        self._layout = layout

    def pack(self, lora: GatedLoRA) -> FusedLoRA:
        """Pack an adapter that fits the decoder. Any thread may call it."""
        packed = FusedLoRA(lora.shape.masks)
        layers = range(len(self._body.layers))
        pairs = [self._low_rank(packed, lora, layer, names) for layer in layers for names in self._together]
        packed.pairs = (_LowRank * len(pairs))(*pairs)
        embedding = lora.mask_embedding_KH.detach().to(self._dtype, copy=True).contiguous()
        packed.tensors.append(embedding)
        packed.structure = AdapterStruct(
            mask_embedding=embedding.data_ptr(),
            pairs=ctypes.addressof(packed.pairs),
            ranks=max(pair.down.columns for pair in pairs),
        )
        return packed

    def _low_rank(self, packed: FusedLoRA, lora: GatedLoRA, layer: int, names: tuple[str, ...]) -> _LowRank:
        linears = [f"model.layers.{layer}.{name}" for name in names]
        if not any(linear in lora.factors for linear in linears):
            return _LowRank(parts=0)
        downs = []
        ups = []
        for linear in linears:
            module = self._body.layers[layer].get_submodule(linear.split(".", 3)[3])
            down = torch.zeros(1, module.in_features)
            up = torch.zeros(module.out_features, 1)
            if linear in lora.factors:
                down = lora.factors[linear].a.detach()
                up = lora.factors[linear].b.detach() * lora.scale
            missing = -down.shape[0] % self._kind.multiple
            downs.append(nn.functional.pad(down, (0, 0, 0, missing)))
            ups.append(self._weight(packed, nn.functional.pad(up, (0, missing))))
        return _LowRank(down=self._weight(packed, torch.cat(downs)), up=(Matrix * 3)(*ups), parts=len(ups))

    def _weight(self, packed: FusedLoRA, weight: Tensor) -> Matrix:
        linear = pack_weight(weight.to(self._dtype), None, self._kind, self._layout)
        packed.tensors += [tensor for tensor in linear.tensors if tensor is not None]
        return linear.matrix
