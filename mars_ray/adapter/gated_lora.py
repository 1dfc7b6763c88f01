"""Gated LoRA: low-rank weights that act only at mask positions, and the embeddings of masks.

In:    outputs of linear layers of a base network, and the positions of masks.
Out:   the same outputs, with low-rank products added at the masks.
Never: changes other positions or weights of the base; without masks, the output equals that of the base bit for bit.

Source: arXiv 2507.11851. Unlike in that paper, the embedding of a mask depends on its place in the block.
`sampler_head` corrects the masks' logits.

Letters: M masks, N packed positions, K mask embeddings.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mars_ray.adapter.sampler_head import SamplerHead, check_shape
from mars_ray.errors import AdapterError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """The sizes of an adapter."""

    rank: int
    alpha: float
    """Products are scaled by alpha / rank."""
    masks: int
    """Number of mask embeddings; if a block has more masks, the further ones share the last embedding."""
    linears: dict[str, tuple[int, int]]
    """Sizes (in, out) of each adapted linear layer, keyed by the layer's name in the network."""


class LowRank(nn.Module):
    """The two low-rank factors of one linear layer."""

    def __init__(self, rank: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)

    def product(self, x: Tensor) -> Tensor:
        """Return x A^T B^T, in the dtype of `x`."""
        product: Tensor = x @ self.a.to(x.dtype).T @ self.b.to(x.dtype).T
        return product


class GatedLoRA(nn.Module):
    """An adapter. A new one adds nothing: `mask_embedding_KH` and all products are zero."""

    def __init__(self, shape: LoraShape, hidden: int) -> None:
        super().__init__()
        self.shape = shape
        self.mask_embedding_KH = nn.Parameter(torch.zeros(shape.masks, hidden))
        self.sampler = SamplerHead(hidden)
        self.factors = {name: LowRank(shape.rank, *sizes) for name, sizes in shape.linears.items()}
        """Factors of each linear layer, keyed by the layer's name."""
        self._registered = nn.ModuleList(self.factors.values())  # parameter names must not contain dots
        self.scale = shape.alpha / shape.rank
        """Number by which each product is multiplied."""
        self._open = False
        self._where_M: Tensor | None = None

    def masks(self, offset_M: Tensor) -> Tensor:
        """Return the embeddings of masks as a tensor [M, hidden]; `offset_M` counts the masks before each mask in its
        block."""
        embedding_MH: Tensor = self.mask_embedding_KH[offset_M.clamp(max=self.shape.masks - 1)]
        return embedding_MH

    @contextmanager
    def at(self, where_M: Tensor | None) -> Iterator[None]:
        """Let forwards in this context add the products, at the packed positions `where_M` or, if it is None, at all
        positions."""
        self._open = True
        self._where_M = where_M
        try:
            yield
        finally:
            self._open = False
            self._where_M = None

    def check_fits(self, network: Any) -> None:
        """Raise `AdapterError` unless every tensor has the shape that `network` needs.

        Kernels receive only the addresses of these tensors, so they cannot check shapes.
        """
        for name, pair in self.factors.items():
            try:
                linear = network.get_submodule(name)
                inputs = linear.in_features
                outputs = linear.out_features
            except AttributeError:
                raise AdapterError(f"The adapter needs a linear layer {name}, which the network lacks.") from None
            check_shape(f"lora_A of {name}", pair.a, (self.shape.rank, inputs))
            check_shape(f"lora_B of {name}", pair.b, (outputs, self.shape.rank))
        for table in (network.get_input_embeddings(), network.get_output_embeddings()):
            hidden = table.weight.shape[1]
            check_shape("mask_embedding", self.mask_embedding_KH, (self.shape.masks, hidden))
            self.sampler.check_fits(hidden)

    def attach(self, network: nn.Module) -> list[RemovableHandle]:
        """Attach the adapter to the linear layers of `network`; remove the returned handles to detach it.

        Raises `AdapterError` if the adapter does not fit the network.
        """
        self.check_fits(network)
        return [
            network.get_submodule(name).register_forward_hook(partial(self._add, pair))
            for name, pair in self.factors.items()
        ]

    def _add(self, pair: LowRank, _linear: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        if not self._open:
            return out
        if self._where_M is None:
            return out + pair.product(inputs[0]) * self.scale
        # Positions are the second-to-last dimension, with or without a batch of 1 before it.
        product = pair.product(inputs[0].index_select(-2, self._where_M)) * self.scale
        return out.index_add(-2, self._where_M, product)


def linears_of(network: Any, names: Sequence[str] | None) -> dict[str, tuple[int, int]]:
    """Return the sizes of the linear layers that have one of `names`, or, if it is None, of all linear layers except
    the output embedding.

    Raises `AdapterError` if a name belongs to none of these layers, or the network has no linear layers.
    """
    head = network.get_output_embeddings()
    linears = {
        name: (module.in_features, module.out_features)
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if not linears:
        raise AdapterError("The network has no linear layers, so it cannot have an adapter.")
    known = dict.fromkeys(name.rpartition(".")[2] for name in linears)
    if unknown := [name for name in names or () if name not in known]:
        raise AdapterError(
            f"target_modules has {unknown[0]!r}; the linear layers of the network are {', '.join(known)}. Leave "
            "target_modules out to adapt all of them."
        )
    return {name: sizes for name, sizes in linears.items() if names is None or name.rpartition(".")[2] in names}


def new_adapter(network: Any, *, rank: int, alpha: float, masks: int, names: Sequence[str] | None) -> GatedLoRA:
    """Return a new adapter attached to `network`; each mask embedding starts as the mean of all token embeddings."""
    table = network.get_input_embeddings().weight
    linears = linears_of(network, names)
    adapter = GatedLoRA(LoraShape(rank=rank, alpha=alpha, masks=masks, linears=linears), table.shape[1])
    with torch.no_grad():
        adapter.mask_embedding_KH.copy_(table.float().mean(dim=0))
    adapter.attach(network)
    return adapter
