"""Gated LoRA: low-rank weights that act at mask positions only, and what masks look like to the base network.

In:    outputs of linear layers of a base network, and which positions hold masks.
Out:   the same outputs, with low-rank products added at those positions.
Never: changes another position, or a weight of the base: without masks the network is the base, bit for bit.

Source: arXiv 2507.11851. Ours: a mask knows how many masks stand before it, by an embedding of its own. What it then
says is corrected by the sampler head, see there.

Letters: M masks, N packed positions, K masks of a block.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mars_ray.adapter.sampler_head import SamplerHead
from mars_ray.adapter.sizes import check_sizes
from mars_ray.errors import AdapterError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """What decides the form of an adapter."""

    rank: int
    alpha: float
    """The products are scaled by alpha / rank."""
    masks: int
    """Masks of a block that have an embedding; those behind share the last."""
    linears: dict[str, tuple[int, int]]
    """Name of each linear layer of the network that is adapted, and its sizes: (in, out)."""


class LowRank(nn.Module):
    """The two factors beside one linear layer."""

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
    """An adapter. New, it adds nothing yet: `mask_embedding_KH` is zero, and so are all products."""

    def __init__(self, shape: LoraShape, hidden: int) -> None:
        super().__init__()
        self.shape = shape
        self.mask_embedding_KH = nn.Parameter(torch.zeros(shape.masks, hidden))
        self.sampler = SamplerHead(hidden)
        self.factors = {name: LowRank(shape.rank, *sizes) for name, sizes in shape.linears.items()}
        """Those of each linear layer, by its name."""
        self._registered = nn.ModuleList(self.factors.values())  # names with dots cannot be those of parameters
        self.scale = shape.alpha / shape.rank
        """What the products are multiplied with."""
        self._open = False
        self._where_M: Tensor | None = None

    def masks(self, offset_M: Tensor) -> Tensor:
        """Return the embeddings of masks with so many masks before them in their block: [M, hidden]."""
        embedding_MH: Tensor = self.mask_embedding_KH[offset_M.clamp(max=self.shape.masks - 1)]
        return embedding_MH

    @contextmanager
    def at(self, where_M: Tensor | None) -> Iterator[None]:
        """Add the products in forwards within, at these of the packed positions; None: at all of them."""
        self._open, self._where_M = True, where_M
        try:
            yield
        finally:
            self._open, self._where_M = False, None

    def check_fits(self, network: Any) -> None:
        """Raise `AdapterError`, with the tensor and its sizes, unless every tensor has the sizes `network` needs.

        Kernels take these tensors by address alone.
        """
        for name, pair in self.factors.items():
            try:
                linear = network.get_submodule(name)
                sizes = linear.in_features, linear.out_features
            except AttributeError:
                raise AdapterError(f"The adapter is for a network with a linear layer {name}, this has none.") from None
            check_sizes(f"lora_A of {name}", pair.a, (self.shape.rank, sizes[0]))
            check_sizes(f"lora_B of {name}", pair.b, (sizes[1], self.shape.rank))
        for table in (network.get_input_embeddings(), network.get_output_embeddings()):
            hidden = table.weight.shape[1]
            check_sizes("mask_embedding", self.mask_embedding_KH, (self.shape.masks, hidden))
            self.sampler.check_fits(hidden)

    def attach(self, network: nn.Module) -> list[RemovableHandle]:
        """Stand beside the linear layers of `network`, until what is returned is removed.

        Raises `AdapterError` for a network it does not fit.
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
        # Positions are the last dimension but one, whether a batch of 1 stands before it or not.
        product = pair.product(inputs[0].index_select(-2, self._where_M)) * self.scale
        return out.index_add(-2, self._where_M, product)


def linears_of(network: Any, names: Sequence[str] | None) -> dict[str, tuple[int, int]]:
    """Return the linear layers called so, all but the output embedding for None. Raises `AdapterError` for none."""
    head = network.get_output_embeddings()
    found = {
        name: (module.in_features, module.out_features)
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and module is not head and (names is None or name.rpartition(".")[2] in names)
    }
    if not found:
        raise AdapterError(
            f"The network has no linear layer called {' or '.join(names or ['anything'])}; leave target_modules out "
            "to adapt all of them."
        )
    return found


def new_adapter(network: Any, *, rank: int, alpha: float, masks: int, names: Sequence[str] | None) -> GatedLoRA:
    """Return an adapter for `network`, attached to it, with masks that begin as the mean of all tokens."""
    table = network.get_input_embeddings().weight
    linears = linears_of(network, names)
    adapter = GatedLoRA(LoraShape(rank=rank, alpha=alpha, masks=masks, linears=linears), table.shape[1])
    with torch.no_grad():
        adapter.mask_embedding_KH.copy_(table.float().mean(dim=0))
    adapter.attach(network)
    return adapter
