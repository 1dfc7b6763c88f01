"""Run an unmodified HF decoder through torch, with compiled steps if a compiler is present."""

from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.engine.execution.compiled import CompiledSteps
from mars_ray.engine.execution.forward import forward_of
from mars_ray.engine.execution.mask_sampler import MaskSampler, embeddings_of
from mars_ray.engine.execution.model_runner import ForwardOutput
from mars_ray.engine.kv.attention import ATTENTION
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.errors import ModelError


def to_host(token_M: Tensor, confidence_M: Tensor) -> tuple[list[int], list[float]]:
    """Copy the likeliest tokens and their probabilities to the host.

    A greedy step without an adapter waits for the device only here.
    """
    return token_M.tolist(), confidence_M.tolist()


@dataclass(frozen=True, slots=True, eq=False)
class TorchAdapter:
    """An adapter on the device of the network, in float32."""

    lora: GatedLoRA
    sampler: MaskSampler

    @property
    def nbytes(self) -> int:
        """Memory of the adapter in bytes."""
        return sum(parameter.nbytes for parameter in self.lora.parameters())


class TorchRunner:
    """Runs a network, whose attention it replaces. Raises `ModelError` for attention of another kind."""

    def __init__(
        self,
        network: PreTrainedModel,
        cache: SlotKVCache,
        *,
        mask_id: int,
        compiled: bool,
    ) -> None:
        if any(name.endswith(".sinks") for name, _ in network.named_parameters()):
            raise ModelError(
                f"The attention of {network.config.model_type} models has sinks, which the engine does not support. "
                "Choose another model."
            )
        network.set_attn_implementation(ATTENTION)
        if network.config._attn_implementation != ATTENTION:  # transformers only warns
            raise ModelError(
                f"The attention of {network.config.model_type} models cannot be replaced, so the engine does not "
                "support them. Choose another model."
            )
        self._cache = cache
        self._forward = forward_of(network, mask_id)
        self._network = network
        self._adapters: Sequence[TorchAdapter] = ()
        self._attached: dict[TorchAdapter, list[RemovableHandle]] = {}
        """Hooks of each adapter in the network."""
        self._keeping: RemovableHandle | None = None
        """Hook that keeps the hidden states for the sampler heads."""
        self._hidden_MH: Tensor | None = None
        self._compiled = CompiledSteps(network, mask_id) if compiled else None

    def pack(self, lora: GatedLoRA) -> TorchAdapter:
        """Return a copy of an adapter in the form that `use` takes. Any thread may call it, next to a forward.

        Raises `AdapterError` if the adapter does not fit the network.
        """
        lora.check_fits(self._network)
        copied = deepcopy(lora).to(self._network.device)  # the same adapter may have two names
        return TorchAdapter(copied, MaskSampler(copied.sampler, *embeddings_of(self._network)))

    def use(self, adapters: Sequence[TorchAdapter]) -> None:
        """Decode masks with these adapters from the next forward on; batches refer to them by their index."""
        for gone in self._attached.keys() - set(adapters):
            for handle in self._attached.pop(gone):
                handle.remove()
        for adapter in adapters:
            if adapter not in self._attached:
                self._attached[adapter] = adapter.lora.attach(self._network)
        self._adapters = adapters
        if adapters and self._keeping is None:
            head = self._network.get_output_embeddings()
            self._keeping = head.register_forward_pre_hook(self._keep_hidden)
        elif not adapters and self._keeping is not None:
            self._keeping.remove()
            self._keeping = self._hidden_MH = None

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one forward, which writes the keys and values of all its positions to the cache."""
        layers = self._cache.layers
        if self._adapters:  # compiled steps support no adapter
            with ExitStack() as acting:
                embedded_NH = self._adapted_embeddings(batch, acting)
                token_M, confidence_M, logits_MV = self._forward(layers, batch, embedded_NH)
        else:
            compiled = self._compiled.get(batch) if self._compiled and batch.prefill is None else None
            token_M, confidence_M, logits_MV = (compiled or self._forward)(layers, batch)
        return ForwardOutput(*to_host(token_M, confidence_M), logits_MV, self._hidden_MH)

    def _adapted_embeddings(self, batch: ForwardBatch, acting: ExitStack) -> Tensor:
        """Return the embeddings [N, H] of a batch. Each adapter acts on its masks until `acting` closes."""
        embedded_NH: Tensor = self._network.get_input_embeddings()(batch.id_N)
        for number, adapter in enumerate(self._adapters):
            where_L = (batch.adapter_N == number).nonzero().flatten()
            if len(where_L):
                masks_LH = adapter.lora.masks(batch.offset_N[where_L]).to(embedded_NH.dtype)
                embedded_NH = embedded_NH.index_copy(0, where_L, masks_LH)
                acting.enter_context(adapter.lora.at(where_L))
        return embedded_NH

    def _keep_hidden(self, _head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        [self._hidden_MH] = inputs[0]

    def wait_until_compiled(self) -> None:
        """Compile all missing steps now and wait for them. Returns at once if this runner compiles nothing."""
        if self._compiled and not self._adapters:
            self._compiled.wait()

    def close(self) -> None:
        """Stop compiling, and detach the adapters from the network."""
        self.use(())
        if self._compiled:
            self._compiled.close()
