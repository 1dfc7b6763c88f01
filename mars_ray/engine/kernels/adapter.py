"""Pack an adapter for the decoder kernels: mask embeddings, and low-rank factors of the layers that read together.

The factors that read a layer's input have 8 bits, unless the model's weights are in float32. They act at masks only,
and drafts are verified, so rounding them changes speed and never answers in exact mode. The factors that read the ranks
are not rounded to 8 bits, which come in whole groups: a few ranks would be padded to one.
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


def pack_adapter(
    lora: GatedLoRA,
    layers: Sequence[nn.Module],
    groups: Sequence[tuple[str, ...]],
    down_kind: Format,
    dtype: torch.dtype,
    layout: WeightLayout,
) -> FusedLoRA:
    """Pack an adapter that fits the decoder layers `layers`, whose linear layers are packed in `groups` of names.

    Factors are rounded to `dtype`. Those that read a layer's input are then packed as `down_kind`, for the kernels'
    `layout`. Any thread may call it.
    """
    packed = FusedLoRA(lora.shape.masks)
    up_kind = Format.of(dtype)

    def matrix(weight: Tensor, kind: Format) -> Matrix:
        linear = pack_weight(weight.to(dtype), None, kind, layout)
        packed.tensors += [tensor for tensor in linear.tensors if tensor is not None]
        return linear.matrix

    def low_rank(number: int, names: tuple[str, ...]) -> _LowRank:
        if not any(f"model.layers.{number}.{name}" in lora.factors for name in names):
            return _LowRank(parts=0)
        downs = []
        ups = []
        for name in names:
            linear: Any = layers[number].get_submodule(name)
            down = torch.zeros(1, linear.in_features)
            up = torch.zeros(linear.out_features, 1)
            factors = f"model.layers.{number}.{name}"
            if factors in lora.factors:
                down = lora.factors[factors].a.detach()
                up = lora.factors[factors].b.detach() * lora.scale
            missing = -down.shape[0] % up_kind.multiple
            downs.append(nn.functional.pad(down, (0, 0, 0, missing)))
            ups.append(matrix(nn.functional.pad(up, (0, missing)), up_kind))
        return _LowRank(down=matrix(torch.cat(downs), down_kind), up=(Matrix * 3)(*ups), parts=len(ups))

    pairs = [low_rank(number, names) for number in range(len(layers)) for names in groups]
    packed.pairs = (_LowRank * len(pairs))(*pairs)
    embedding = lora.mask_embedding_KH.detach().to(dtype, copy=True).contiguous()
    packed.tensors.append(embedding)
    packed.structure = AdapterStruct(
        mask_embedding=embedding.data_ptr(),
        pairs=ctypes.addressof(packed.pairs),
        ranks=max(pair.down.columns for pair in pairs),
    )
    return packed
