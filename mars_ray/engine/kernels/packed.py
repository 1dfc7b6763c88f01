"""Pack the weights of linear layers for the loop of `linear.h`, in float32, bfloat16, 8 or 4 bits.

In 8 and 4 bits, 64 numbers share a scale, because a tile of AMX sums 64 products of bytes at once. In 4 bits, each half
of such a group also has a step and a minimum, whole numbers in units of the scale, so its numbers unpack to 8 bits with
the same sums.

Blocks of outputs and the order of numbers in them depend on the `WeightLayout` of the kernel library.

Letters: N outputs, K inputs, G groups of an output's inputs, C outputs of a block.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor, nn

from mars_ray.engine.kernels.build import WeightLayout

GROUP = 64
"""Number of weights of one output that share a scale."""
HALF = 32
"""Number of 4-bit weights of one output that share a multiplier and an offset."""
DIVISORS = range(8, 16)
"""Numbers of scales in the step of a half. With 8, every range fits into 8 bits, and most do with more."""

FLOAT16_LEAST = 2.0**-24
"""The least number of float16 above 0, and the distance of its smallest numbers."""
FLOAT16_EPS = 2.0**-10
"""The distance of float16 numbers at 1."""

TILE = 1 << 19
"""Number of weights that are rounded together."""


class Format(IntEnum):
    """Number formats of packed weights."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    """8 bits, with a float16 scale per group of 64 weights of an output. Inputs are rounded to 8 bits, with a float32
    scale per group."""
    INT4 = 3
    """4 bits, with a float16 scale per group of 64 weights of an output, and a multiplier and an offset per half of a
    group. Inputs are rounded as with INT8."""

    @classmethod
    def of(cls, dtype: torch.dtype) -> "Format":
        """Return the format that does not round weights of `dtype`."""
        return {torch.float32: cls.FLOAT32, torch.bfloat16: cls.BFLOAT16}[dtype]

    @property
    def multiple(self) -> int:
        """Number of which the inputs of a layer must be a multiple."""
        if self is Format.FLOAT32:
            return 1
        return 32 if self is Format.BFLOAT16 else GROUP


class Matrix(ctypes.Structure):
    """The struct `Matrix` of `matrix.h`."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("alternating", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed layer: the tensors that own its memory, and the struct that points into them."""

    tensors: tuple[Tensor | None, ...]
    matrix: Matrix


def pack(layers: Sequence[nn.Linear], kind: Format, layout: WeightLayout, *, alternating: bool = False) -> PackedLinear:
    """Pack layers that read the same input as one layer with concatenated outputs.

    With `alternating`, vectors of the first and of the second half of the outputs take turns, so that a thread computes
    the gate and the up projection of an output together.
    """
    bias = None
    if any(layer.bias is not None for layer in layers):
        parts = [torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers]
        bias = _pad(torch.cat([part.float() for part in parts]), layout.columns)
    weight = torch.cat([layer.weight.detach() for layer in layers])
    if not alternating:
        return pack_weight(weight, bias, kind, layout)
    weight, bias = _alternate(weight, layout), None if bias is None else _alternate(bias, layout)
    packed = pack_weight(weight, bias, kind, layout)
    packed.matrix.alternating = 1
    return packed


def pack_weight(weight: Tensor, bias: Tensor | None, kind: Format, layout: WeightLayout) -> PackedLinear:
    """Pack a weight [N, K], where K is a multiple of `kind.multiple`, and a float32 bias that is already padded."""
    weight = _pad(weight, layout.columns)
    if kind is Format.INT4:
        packed = _in_tiles(partial(_pack_int4, columns=layout.columns), weight, layout)
    elif kind is Format.INT8:
        packed = _in_tiles(partial(_pack_int8, layout=layout), weight, layout)
    elif kind is Format.BFLOAT16 and not layout.pairs:
        packed = _side_by_side(weight.to(torch.bfloat16), layout.columns)
    else:
        dtype = torch.float32 if kind is Format.FLOAT32 else torch.bfloat16
        packed = _interleave(weight.to(dtype), layout.columns, 4 // dtype.itemsize)
    addresses = [tensor.data_ptr() if tensor is not None else None for tensor in (packed, bias)]
    return PackedLinear((packed, bias), Matrix(*addresses, weight.shape[0], weight.shape[1], kind))


def unpack(linear: PackedLinear, layout: WeightLayout) -> Tensor:
    """Return the weight [N, K] of a packed layer in 8 bits or more; N counts the rows that fill its last block, too."""
    packed, _ = linear.tensors
    assert packed is not None
    columns = layout.columns
    if linear.matrix.format == Format.INT8:
        return _unpack_int8(packed, layout)
    if linear.matrix.format == Format.BFLOAT16 and not layout.pairs:
        return packed.permute(0, 3, 2, 1).reshape(-1, linear.matrix.depth)
    assert linear.matrix.format in (Format.FLOAT32, Format.BFLOAT16)
    return packed.transpose(1, 2).reshape(packed.shape[0] * columns, -1)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights as int8 [N, G, 64], and the scale of each group as float16 [N, G]."""
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    largest = groups.abs().amax(dim=2)
    scale = (largest / 127).half()
    # float16 rounds tiny scales coarsely, so round up; otherwise the largest weights would be clipped.
    scale = torch.where(scale.float() * 127 < largest, (scale.view(torch.int16) + 1).view(torch.float16), scale)
    number = (groups / scale.float().clamp(min=1e-30)[..., None]).round()
    return number.clamp(-127, 127).to(torch.int8), scale


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return unsigned 4-bit numbers [N, G, 64], scales [N, G], and multipliers and offsets [N, G, 2].

    A weight is (number * multiplier - offset) * scale. Scales are in float16. Each half of a group has its own
    multiplier and offset, with which the difference in brackets is within [-127, 127].
    """
    halves = weight.float().view(weight.shape[0], -1, 2, HALF)
    low = halves.amin(dim=3).clamp(max=0)
    scale, multiplier, offset = _share_scales(low, halves.amax(dim=3).clamp(min=0))
    wide = scale.float().clamp(min=1e-30)[..., None]
    number = (halves + (offset * wide)[..., None]) / (multiplier * wide)[..., None]
    number = number.round().clamp(0, 15).to(torch.uint8).flatten(2)
    return number, scale, multiplier.to(torch.uint8), offset.to(torch.uint8)


def _share_scales(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales [N, G], and multipliers and offsets [N, G, 2], for halves from `low` to `high` [N, G, 2].

    A scale is the larger step of both halves divided by a whole number. It is the one with which the ends of both
    ranges are nearest to numbers that can be stored.
    """
    steps = (high - low) / 15
    widest = steps.amax(dim=2)
    least = torch.full_like(widest, torch.inf)
    scale, multiplier, offset = torch.zeros_like(widest), torch.ones_like(steps), torch.zeros_like(steps)
    for divisor in DIVISORS:
        tried = (widest / divisor).half().float()
        # Among the smallest numbers of float16, rounding down would leave no scale that fits.
        tried = torch.where(tried * divisor < widest * (1 - FLOAT16_EPS), tried + FLOAT16_LEAST, tried)
        times = 1 / tried.clamp(min=1e-30)[..., None]
        multipliers = (steps * times).round().clamp(1, 15)
        offsets = (-low * times).round().clamp(0, 127)
        shift = offsets * tried[..., None] + low
        stretch = multipliers * tried[..., None] - steps
        error = (shift.square() + (15 * stretch - shift).square()).sum(dim=2)  # at both ends of the ranges
        fits = (15 * multipliers - offsets <= 127).all(dim=2) & (error < least)
        least = torch.where(fits, error, least)
        scale = torch.where(fits, tried, scale)
        multiplier = torch.where(fits[..., None], multipliers, multiplier)
        offset = torch.where(fits[..., None], offsets, offset)
    return torch.where(least.isinf(), torch.nan, scale).half(), multiplier, offset


def _alternate(rows: Tensor, layout: WeightLayout) -> Tensor:
    """Let vectors of the first and of the second half of the rows take turns."""
    return rows.view(2, -1, layout.columns // 2, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _pad(rows: Tensor, columns: int) -> Tensor:
    """Pad the outputs with zeros to a multiple of the block size."""
    missing = -rows.shape[0] % columns
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _in_tiles(round_and_pack: Callable[[Tensor], Tensor], weight: Tensor, layout: WeightLayout) -> Tensor:
    """Pack blocks of outputs a few at a time, so that the temporary tensors of rounding stay in the caches.

    Each thread packs its own tiles. Threads that share every operation would wait for each other, long on a busy
    machine.
    """
    blocks = max(1, TILE // (layout.columns * weight.shape[1]))
    starts = range(0, weight.shape[0] // layout.columns, blocks)
    if len(starts) == 1:
        return round_and_pack(weight)
    first = round_and_pack(weight[: layout.columns])
    packed = first.new_empty(weight.shape[0] // layout.columns, *first.shape[1:])

    def pack_tile(start: int) -> None:
        tile = weight[start * layout.columns : (start + blocks) * layout.columns]
        packed[start : start + blocks] = round_and_pack(tile)

    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(pack_tile, starts))
    finally:
        torch.set_num_threads(threads)  # for threads that start later
    return packed


def _interleave(weight: Tensor, columns: int, together: int) -> Tensor:
    """Lay out a weight [N, K] as [N / C, K / together, C, together], so that the kernel reads memory in order.

    C is `columns`, the outputs of a block; `together` is the number of inputs that the kernel multiplies at once.
    """
    return weight.view(-1, columns, weight.shape[1] // together, together).transpose(1, 2).contiguous()


def _side_by_side(weight: Tensor, columns: int) -> Tensor:
    """Lay out a weight [N, K] as [N / C, K, C / 2, 2].

    A pair is an output of the first half of a block and one of the second half.
    """
    return weight.view(-1, 2, columns // 2, weight.shape[1]).permute(0, 3, 2, 1).contiguous()


def _pack_int8(weight: Tensor, layout: WeightLayout) -> Tensor:
    number, scale = quantize_int8(weight)
    stored = (number.to(torch.int16) + layout.byte_offset).to(torch.uint8)  # negative numbers wrap to two's complement
    steps = stored.view(-1, layout.columns, number.shape[1], GROUP // 4, 4).permute(0, 2, 3, 1, 4).flatten(2)
    return torch.cat([steps, _of_groups(scale, layout.columns)], dim=2).contiguous()


def _unpack_int8(packed: Tensor, layout: WeightLayout) -> Tensor:
    steps, scales = packed[..., : GROUP * layout.columns], packed[..., GROUP * layout.columns :]
    stored = steps.reshape(*steps.shape[:2], GROUP // 4, layout.columns, 4).permute(
        0, 3, 1, 2, 4
    )  # [N / C, C, G, 16, 4]
    number = stored.flatten(3).to(torch.int16) - layout.byte_offset
    number = torch.where(number > 127, number - 256, number)  # without an offset, negative numbers have wrapped
    scale = scales.contiguous().view(torch.float16).transpose(1, 2)
    groups: Tensor = number.float() * scale.float()[..., None]
    return groups.flatten(2).flatten(0, 1)


def _of_groups(values: Tensor, columns: int) -> Tensor:
    """Lay out one value per group [N, G] as bytes [N / C, G, B], where B are the bytes of the C values of a block."""
    return values.view(-1, columns, values.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def _pack_int4(weight: Tensor, columns: int) -> Tensor:
    number, scale, multiplier, offset = quantize_int4(weight)
    blocks = number.view(-1, 2, columns // 2, number.shape[1], GROUP // 4, 4)
    nibbles = blocks[:, 0] | blocks[:, 1] << 4  # [N / C, C / 2, G, 16, 4]
    steps = nibbles.permute(0, 2, 3, 1, 4).flatten(2)
    halves = [_of_groups(values[..., half], columns) for values in (multiplier, offset) for half in (0, 1)]
    return torch.cat([steps, _of_groups(scale, columns), *halves], dim=2).contiguous()
