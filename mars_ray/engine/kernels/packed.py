"""Pack the weights of linear layers for the loop of `linear.h`, in float32, bfloat16, 8 or 4 bits."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor, nn

COLUMNS = 32
"""Number of outputs per block."""
GROUP = 32
"""Number of weights of one output that share a scale."""


class Format(IntEnum):
    """Number formats of packed weights."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    """8 bits, with a float16 scale per group of 32 weights of an output. Inputs are rounded in the same way."""
    INT4 = 3
    """4 bits, with a float16 scale and minimum per group of 32 weights of an output. Inputs are rounded to 8 bits."""


class Matrix(ctypes.Structure):
    """The struct `Matrix` of `linear.h`."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("format", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed layer: the tensors that own its memory, and the struct that points into them."""

    tensors: tuple[Tensor | None, ...]
    matrix: Matrix


def pack(layers: Sequence[nn.Linear], kind: Format) -> PackedLinear:
    """Pack layers that read the same input as one layer with concatenated outputs.

    The number of inputs must be a multiple of 32.
    """
    bias = None
    if any(layer.bias is not None for layer in layers):
        parts = [torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers]
        bias = _pad(torch.cat([part.float() for part in parts]))
    return pack_weight(torch.cat([layer.weight.detach() for layer in layers]), bias, kind)


def pack_weight(weight: Tensor, bias: Tensor | None, kind: Format) -> PackedLinear:
    """Pack a weight [N, K], where K is a multiple of 32, and a float32 bias that is already padded."""
    weight = _pad(weight)
    if kind is Format.INT4:
        packed = _pack_int4(weight.float())
    elif kind is Format.INT8:
        packed = _pack_int8(weight)
    else:
        dtype = torch.float32 if kind is Format.FLOAT32 else torch.bfloat16
        packed = _interleave(weight.to(dtype), 4 // dtype.itemsize)
    addresses = [tensor.data_ptr() if tensor is not None else None for tensor in (packed, bias)]
    return PackedLinear((packed, bias), Matrix(*addresses, weight.shape[0], weight.shape[1], kind))


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights as int8 [N, G, 32], and the scale of each group as float16 [N, G]."""
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    scale = (groups.abs().amax(dim=2) / 127).half()
    number = (groups / scale.float().clamp(min=1e-30)[..., None]).round()
    return number.clamp(-127, 127).to(torch.int8), scale


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights as unsigned 4-bit numbers [N, G, 32], and each group's scale and minimum as float16 [N, G]."""
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    least = groups.amin(dim=2).half()
    scale = ((groups.amax(dim=2) - least.float()) / 15).half()
    number = (groups - least.float()[..., None]) / scale.float().clamp(min=1e-30)[..., None]
    return number.round().clamp(0, 15).to(torch.uint8), scale, least


def _pad(rows: Tensor) -> Tensor:
    """Pad the outputs with zeros to a multiple of the block size."""
    missing = -rows.shape[0] % COLUMNS
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _interleave(weight: Tensor, together: int) -> Tensor:
    """Lay out [N, K] as [N / 32, K / together, 32, together], so that each step of the loop reads contiguous memory."""
    outputs, depth = weight.shape
    return weight.view(outputs // COLUMNS, COLUMNS, depth // together, together).transpose(1, 2).contiguous()


def _pack_int8(weight: Tensor) -> Tensor:
    number, scale = quantize_int8(weight)
    blocks = (number.to(torch.int16) + 128).to(torch.uint8).view(-1, COLUMNS, number.shape[1], GROUP // 4, 4)
    steps = blocks.permute(0, 2, 3, 1, 4).flatten(2)
    return torch.cat([steps, _of_groups(scale)], dim=2).contiguous()


def _of_groups(values: Tensor) -> Tensor:
    """Lay out float16 values [N, G] as bytes [N / 32, G, 64]."""
    return values.view(-1, COLUMNS, values.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def _pack_int4(weight: Tensor) -> Tensor:
    number, scale, least = quantize_int4(weight)
    blocks = number.view(-1, 2, COLUMNS // 2, number.shape[1], GROUP // 4, 4)
    halves = blocks[:, 0] | blocks[:, 1] << 4  # [blocks, 16, groups, 8, 4]
    steps = halves.permute(0, 2, 3, 1, 4).flatten(2)
    return torch.cat([steps, _of_groups(scale), _of_groups(least)], dim=2).contiguous()
