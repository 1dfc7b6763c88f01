"""Convert an adapter to the named tensors of its file and back, with rounding to 8 bits.

In:    an adapter; or the tensors of an untrusted file, and the rank and alpha.
Out:   named tensors; or an adapter in float32.
Never: builds an adapter before every tensor has a known name, the right shape and finite values.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mars_ray.adapter.gated_lora import GatedLoRA, LoraShape
from mars_ray.errors import AdapterError

PREFIX = "base_model.model."
EMBEDDING = "mask_embedding"
SAMPLER = "sampler."
SCALE = "_scale"
FACTORS = ".lora_A.weight", ".lora_B.weight"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
LARGEST = torch.finfo(torch.float16).max
"""Maximum magnitude of a value, so that no product of one layer overflows in any dtype of the engine. Those of several
layers may; `execution/input_packer` and the kernels keep them from tokens and drafts."""
LARGEST_INT8 = 127


def stored_tensors(adapter: GatedLoRA, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors to store for an adapter, keyed by their names in the file.

    With `torch.int8`, each matrix has one scale per row, or per column if it has fewer columns than rows. The mask
    embeddings and the bias are stored in bfloat16.
    """
    plain = torch.bfloat16 if dtype is torch.int8 else dtype
    tensors: dict[str, Tensor] = {}
    for name, tensor in _parameters(adapter).items():
        if dtype is torch.int8 and tensor.ndim == 2 and name != EMBEDDING:
            tensors[name], tensors[name + SCALE] = rounded(tensor)
        else:
            tensors[name] = tensor.to(plain)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def adapter_of(tensors: Mapping[str, Tensor], rank: object, alpha: object) -> GatedLoRA:
    """Build the adapter from the tensors of a file. Raises `AdapterError` if the tensors do not fit together."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(f"r is {rank!r}; it must be a whole number of at least 1.")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= LARGEST:
        raise AdapterError(f"lora_alpha is {alpha!r}; it must be a number of at most {LARGEST:g}.")
    weights = _in_float32(tensors)
    masks, hidden = _matrix(weights, EMBEDDING)
    first, second = FACTORS
    names = [name.removesuffix(first) for name in weights if name.endswith(first)]
    linears = {
        name.removeprefix(PREFIX): (_matrix(weights, name + first)[1], _matrix(weights, name + second)[0])
        for name in names
        if name.startswith(PREFIX)
    }
    if not linears:
        raise AdapterError("it has no low-rank factors.")
    shape = LoraShape(rank=rank, alpha=alpha, masks=masks, linears=linears)
    with torch.device("meta"):
        needed = {name: tuple(tensor.shape) for name, tensor in _parameters(GatedLoRA(shape, hidden)).items()}
    if unknown := sorted(set(weights) - set(needed)):
        raise AdapterError(f"the tensor {unknown[0]} does not belong to an adapter.")
    for name, sizes in needed.items():
        if (shape_in_file := _shape(weights, name)) != sizes:
            raise AdapterError(f"the tensor {name} has the shape {shape_in_file}; it needs {sizes}.")
        if name.endswith(second) and not float(weights[name].abs().max()) * abs(alpha) / rank <= LARGEST:
            raise AdapterError(f"the tensor {name} times lora_alpha / r holds values larger than {LARGEST:g}.")
    adapter = GatedLoRA(shape, hidden)
    with torch.no_grad():
        for name, parameter in _parameters(adapter).items():
            parameter.copy_(weights[name])
    return adapter


def _parameters(adapter: GatedLoRA) -> dict[str, Tensor]:
    """Return the parameters of an adapter, keyed by their names in the adapter file."""
    factors = {
        f"{PREFIX}{name}{half}": factor
        for name, pair in adapter.factors.items()
        for half, factor in zip(FACTORS, (pair.a, pair.b), strict=True)
    }
    return {EMBEDDING: adapter.mask_embedding_KH} | factors | adapter.sampler.state_dict(prefix=SAMPLER)


def _in_float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors except the scales, converted to float32; int8 tensors are multiplied by their scales."""
    weights = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise AdapterError(f"the tensor {name} has the dtype {tensor.dtype}; it must be one of {dtypes}.")
        scaled = name.removesuffix(SCALE)
        if scaled != name and scaled in tensors and tensors[scaled].dtype is torch.int8:
            continue
        if tensor.dtype is torch.int8:
            rows, columns = _matrix(tensors, name)
            if (shape := _shape(tensors, name + SCALE)) not in ((rows, 1), (1, columns)):
                raise AdapterError(
                    f"the tensor {name}{SCALE} has the shape {shape}; it needs {(rows, 1)} or {(1, columns)}."
                )
            weights[name] = tensor.float() * tensors[name + SCALE].float()
        else:
            weights[name] = tensor.float()
        if not bool((weights[name].abs() <= LARGEST).all()):  # false for NaN too
            raise AdapterError(f"the tensor {name} holds values that are NaN or larger than {LARGEST:g}.")
    return weights


def _matrix(tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    match _shape(tensors, name):
        case (rows, columns) if rows > 0 and columns > 0:
            return rows, columns
        case shape:
            raise AdapterError(f"the tensor {name} has the shape {shape}; it needs two sizes of at least 1.")


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    if name not in tensors:
        raise AdapterError(f"the tensor {name} is missing.")
    return tuple(tensors[name].shape)


def rounded(factor_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest int8 values as [R, C], and float32 scales: [R, 1], or [1, C] if there are fewer columns."""
    factor_RC = factor_RC.float()
    rows, columns = factor_RC.shape
    scale = factor_RC.abs().amax(dim=0 if columns < rows else 1, keepdim=True) / LARGEST_INT8
    # A row of zeros has scale 0, so the divisor is clamped.
    values_RC = (factor_RC / scale.clamp(min=torch.finfo(torch.float32).tiny)).round()
    return values_RC.to(torch.int8), scale
