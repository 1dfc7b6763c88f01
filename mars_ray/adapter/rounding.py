"""Factors in 8 bits: whole numbers from -127 to 127, and one scale for each row."""

import torch
from torch import Tensor

LARGEST = 127


def rounded(factor_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest int8 values and the float32 scales, [R, 1], that their rows are multiplied with."""
    factor_RC = factor_RC.float()
    scale_R1 = factor_RC.abs().amax(dim=1, keepdim=True) / LARGEST
    # A row of zeros has the scale 0, by which nothing can be divided.
    values_RC = (factor_RC / scale_R1.clamp(min=torch.finfo(torch.float32).tiny)).round()
    return values_RC.to(torch.int8), scale_R1


def restored(values_RC: Tensor, scale_R1: Tensor) -> Tensor:
    """Return what was rounded, in float32. Raises `ValueError` for scales that are not those of its rows."""
    if scale_R1.shape != (len(values_RC), 1):
        raise ValueError(f"scales of the shape {tuple(scale_R1.shape)} for {len(values_RC)} rows")
    return values_RC.float() * scale_R1.float()
