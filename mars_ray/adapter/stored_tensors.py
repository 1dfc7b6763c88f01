"""The tensors of an adapter as its file holds them: their names, their rounding to 8 bits, and their sizes.

In:    an adapter; or the tensors of a file that anybody may have written, with rank and alpha.
Out:   named tensors; or an adapter in float32 that holds them.
Never: builds an adapter before every tensor of the file has a known name, the shape it needs and finite values.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mars_ray.adapter.gated_lora import GatedLoRA, LoraShape
from mars_ray.adapter.rounding import restored, rounded
from mars_ray.errors import AdapterError

PREFIX, EMBEDDING, SAMPLER, SCALE = "base_model.model.", "mask_embedding", "sampler.", "_scale"
FACTORS = ".lora_A.weight", ".lora_B.weight"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
LARGEST = torch.finfo(torch.float16).max
"""Largest magnitude of a value, so that no product of an adapter overflows in any format of the engine."""


def stored_tensors(adapter: GatedLoRA, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what the file of `adapter` holds. In `torch.int8` a matrix has one scale for each row; the embeddings of
    masks and the bias are in bfloat16."""
    plain = torch.bfloat16 if dtype is torch.int8 else dtype
    tensors: dict[str, Tensor] = {}
    for name, tensor in _parameters(adapter).items():
        if dtype is torch.int8 and tensor.ndim == 2 and name != EMBEDDING:
            tensors[name], tensors[name + SCALE] = rounded(tensor)
        else:
            tensors[name] = tensor.to(plain)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def adapter_of(tensors: Mapping[str, Tensor], rank: object, alpha: object) -> GatedLoRA:
    """Return the adapter in the tensors of a file. Raises `AdapterError` for what does not fit together."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(f"r is {rank!r}; it must be a whole number of at least 1.")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= LARGEST:
        raise AdapterError(f"lora_alpha is {alpha!r}; it must be a number of at most {LARGEST:g}.")
    found = _in_float32(tensors)
    masks, hidden = _matrix(found, EMBEDDING)
    first, second = FACTORS
    names = [name.removesuffix(first) for name in found if name.endswith(first)]
    linears = {
        name.removeprefix(PREFIX): (_matrix(found, name + first)[1], _matrix(found, name + second)[0])
        for name in names
        if name.startswith(PREFIX)
    }
    if not linears:
        raise AdapterError("it has no low-rank factors.")
    shape = LoraShape(rank=rank, alpha=alpha, masks=masks, linears=linears)
    with torch.device("meta"):
        needed = {name: tuple(tensor.shape) for name, tensor in _parameters(GatedLoRA(shape, hidden)).items()}
    if unknown := sorted(set(found) - set(needed)):
        raise AdapterError(f"the tensor {unknown[0]} is none of an adapter's.")
    for name, sizes in needed.items():
        if (there := _shape(found, name)) != sizes:
            raise AdapterError(f"the tensor {name} has the shape {there}; it needs {sizes}.")
        if name.endswith(second) and not float(found[name].abs().max()) * abs(alpha) / rank <= LARGEST:
            raise AdapterError(f"the tensor {name} times lora_alpha / r holds values larger than {LARGEST:g}.")
    adapter = GatedLoRA(shape, hidden)
    with torch.no_grad():
        for name, parameter in _parameters(adapter).items():
            parameter.copy_(found[name])
    return adapter


def _parameters(adapter: GatedLoRA) -> dict[str, Tensor]:
    """Return the parameters of an adapter by their names in its file."""
    factors = {
        f"{PREFIX}{name}{half}": factor
        for name, pair in adapter.factors.items()
        for half, factor in zip(FACTORS, (pair.a, pair.b), strict=True)
    }
    return {EMBEDDING: adapter.mask_embedding_KH} | factors | adapter.sampler.state_dict(prefix=SAMPLER)


def _in_float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors but the scales, those in int8 multiplied with theirs."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            known = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
            raise AdapterError(f"the tensor {name} is of {tensor.dtype}; an adapter's are of {known}.")
        rows = name.removesuffix(SCALE)
        if rows != name and rows in tensors and tensors[rows].dtype is torch.int8:
            continue
        if tensor.dtype is torch.int8:
            count, _ = _matrix(tensors, name)
            if (there := _shape(tensors, name + SCALE)) != (count, 1):
                raise AdapterError(f"the tensor {name}{SCALE} has the shape {there}; it needs {(count, 1)}.")
            found[name] = restored(tensor, tensors[name + SCALE])
        else:
            found[name] = tensor.float()
        if not bool((found[name].abs() <= LARGEST).all()):  # false for NaN, too
            raise AdapterError(f"the tensor {name} holds values that are NaN or larger than {LARGEST:g}.")
    return found


def _matrix(tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    match _shape(tensors, name):
        case (rows, columns) if rows > 0 and columns > 0:
            return rows, columns
        case there:
            raise AdapterError(f"the tensor {name} has the shape {there}; it needs two sizes of at least 1.")


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    if name not in tensors:
        raise AdapterError(f"the tensor {name} is missing.")
    return tuple(tensors[name].shape)
