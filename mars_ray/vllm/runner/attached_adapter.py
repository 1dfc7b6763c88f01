"""Attach a lossless adapter to a network of vLLM: low-rank products and embeddings at masks, and the sampler head.

Masks have token ids of their own: the k-th mask of a request, counted from 0, has the id V + k. So the ids alone say
where the adapter acts. The gate is computed from them into a buffer with a fixed address, outside of compiled code, and
every position computes the products. No step depends on a value that the host reads, so a CUDA graph can capture the
forward.

With tensor parallelism a rank holds the parts of the factors that belong to its part of a layer. Products are added
before vLLM sums the ranks' outputs, so they cost no communication of their own. The sampler head needs two sums a mask.

Letters: P positions of a step, N rows of logits, R requests, C candidates, H hidden size, V tokens of the vocabulary.
"""

from collections import defaultdict
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

from mars_ray.adapter.folder import load_adapter
from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.adapter.sampler_head import likeliest
from mars_ray.vllm.runner.kernels.layout import StepLayout


class AttachedAdapter:
    """The adapter in `folder`, attached to a network whose weights are those in `base`.

    Never: changes the output at a position that holds no mask.
    """

    def __init__(self, folder: Path, base: Path, network: nn.Module, max_tokens: int, vocab_size: int) -> None:
        embedding: nn.Module = network.model.embed_tokens  # type: ignore[assignment, union-attr]
        self._embedding = embedding
        self._unembedding: Any = network.lm_head
        weight: Tensor = embedding.weight  # type: ignore[assignment]
        device, dtype = weight.device, weight.dtype
        lora = load_adapter(folder, base).lora.to(device)
        self._head = lora.sampler
        self._mask_embedding_KH = lora.mask_embedding_KH.to(dtype)
        self._vocab_size = vocab_size
        self._offset_P = torch.full((max_tokens,), -1, device=device)
        """Masks before each mask of its request; negative at tokens."""
        self._hidden_NH: Tensor | None = None
        network.register_forward_pre_hook(self._open_gate, with_kwargs=True)
        embedding.register_forward_pre_hook(self._replace_masks)
        embedding.register_forward_hook(self._embed_masks)
        network.logits_processor.register_forward_pre_hook(self._keep_hidden)  # type: ignore[union-attr]
        for name, names in _fused(lora, network).items():
            linear: Any = network.get_submodule(name)
            a_JH, b_OJ = _factors(lora, linear, names)
            # A layer cut by its inputs sums over ranks after this method, which other layers may share.
            method = linear.quant_method = copy(linear.quant_method)
            method.apply = partial(self._apply, method.apply, a_JH.to(dtype), b_OJ.to(dtype))

    def correct(self, logits_NV: Tensor, layout: StepLayout, start_R: Tensor, most: int) -> None:
        """Correct the logits of up to `most` masks per request in place, from left to right.

        `start_R` are the requests' first rows. The head reads the likeliest token before each mask. If another token
        is chosen there, the outcome of the step uses no mask after it.
        """
        assert self._hidden_NH is not None
        for mask in range(most):
            is_mask_R = mask < layout.masks_R
            row_R = (start_R + layout.known_R + layout.drafts_R + mask).clamp(max=logits_NV.shape[0] - 1)
            before_R = logits_NV[row_R - 1].argmax(dim=-1)
            _, token_RC = likeliest(logits_NV[row_R])
            read_RW = self._head.read(self._hidden_NH[row_R].float())
            before_RH = self._embedding.forward(before_R).float()  # without the hooks, which are for positions
            here_RCH = self._unembedded_here(token_RC).float()
            correction_RC = tensor_model_parallel_all_reduce(self._head.correction(read_RW, before_RH, here_RCH))
            # Requests without this mask add zeros, because their row may be the mask of another request.
            change_RC = torch.where(is_mask_R[:, None], correction_RC, 0).to(logits_NV.dtype)
            logits_NV.index_put_((row_R[:, None], token_RC), change_RC, accumulate=True)

    def _open_gate(self, _network: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids_P = named["input_ids"] if "input_ids" in named else inputs[0]
        self._offset_P[: ids_P.shape[0]] = ids_P - self._vocab_size

    def _replace_masks(self, _embedding: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (inputs[0].clamp(max=self._vocab_size - 1),)

    def _embed_masks(self, _embedding: nn.Module, _inputs: tuple[Tensor, ...], embedded_PH: Tensor) -> Tensor:
        offset_P = self._offset_P[: embedded_PH.shape[0]]
        masks_PH = self._mask_embedding_KH[offset_P.clamp(0, self._mask_embedding_KH.shape[0] - 1)]
        return torch.where(offset_P[:, None] >= 0, masks_PH, embedded_PH)

    def _apply(
        self,
        stock: Callable[..., Tensor],
        a_JH: Tensor,
        b_OJ: Tensor,
        linear: nn.Module,
        x_PH: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        is_mask_P1 = self._offset_P[: x_PH.shape[0], None] >= 0
        out_PO = stock(linear, x_PH, bias)
        return torch.where(is_mask_P1, out_PO + x_PH @ a_JH.T @ b_OJ.T, out_PO)

    def _unembedded_here(self, token_RC: Tensor) -> Tensor:
        """Return the output embeddings of tokens that this rank holds, and zeros for those of other ranks."""
        part = self._unembedding.shard_indices
        row_RC = token_RC - part.org_vocab_start_index
        is_here_RC = (row_RC >= 0) & (token_RC < part.org_vocab_end_index)
        rows_RCH: Tensor = self._unembedding.weight[torch.where(is_here_RC, row_RC, 0)]
        return rows_RCH * is_here_RC[..., None]

    def _keep_hidden(self, _processor: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._hidden_NH = inputs[1]


def _fused(lora: GatedLoRA, network: nn.Module) -> dict[str, list[str]]:
    """Return the adapted linear layers of vLLM's network, each with the names in the checkpoint that it joins."""
    packed: dict[str, list[str]] = network.packed_modules_mapping  # type: ignore[assignment]
    layer_of = {part: (whole, parts) for whole, parts in packed.items() for part in parts}
    fused: dict[str, list[str]] = defaultdict(list)
    for name in lora.factors:
        parent, _, part = name.rpartition(".")
        whole, parts = layer_of.get(part, (part, [part]))
        fused[f"{parent}.{whole}"] = [f"{parent}.{part}" for part in parts]
    return fused


def _factors(lora: GatedLoRA, linear: Any, names: list[str]) -> tuple[Tensor, Tensor]:
    """Return this rank's parts of the factors of one linear layer, scaled: those of the layers it joins, stacked.

    vLLM's loaders cut them as they cut the layer's weight.
    """
    pairs = {name: lora.factors[name] for name in names if name in lora.factors}
    a_JH = torch.cat([pair.a for pair in pairs.values()]).detach()
    if isinstance(linear, RowParallelLinear):
        [only] = pairs.values()
        return _loaded(linear, a_JH, (len(a_JH), linear.input_size_per_partition), input_dim=1), only.b * lora.scale
    columns: list[Tensor] = []
    for number, name in enumerate(names):
        if pair := pairs.get(name):
            part = name.rpartition(".")[2][0] if isinstance(linear, QKVParallelLinear) else number
            shape = (linear.output_size_per_partition, pair.b.shape[1])
            columns.append(_loaded(linear, pair.b * lora.scale, shape, part, output_dim=0))
    return a_JH, torch.cat(columns, dim=1)


def _loaded(linear: Any, whole: Tensor, shape: tuple[int, int], *part: str | int, **dimension: int) -> Tensor:
    """Return this rank's part of a factor, in zeros of the given shape."""
    parameter = nn.Parameter(whole.new_zeros(shape), requires_grad=False)
    for name, number in dimension.items():
        setattr(parameter, name, number)
    linear.weight_loader(parameter, whole.detach(), *part)
    return parameter.data
