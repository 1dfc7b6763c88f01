"""Run an unmodified HF decoder through torch, with compiled steps if a compiler is present."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.engine.execution.compiled import CompiledSteps
from mars_ray.engine.execution.forward import forward_of
from mars_ray.engine.execution.mask_sampler import MaskSampler, embeddings_of
from mars_ray.engine.execution.model_runner import ForwardOutput, MaskCorrector
from mars_ray.engine.kv.attention import ATTENTION
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.errors import ModelError


def to_host(token_M: Tensor, confidence_M: Tensor) -> tuple[list[int], list[float]]:
    """Copy the likeliest tokens and their probabilities to the host.

    A greedy step without an adapter waits for the device only here.
    """
    return token_M.tolist(), confidence_M.tolist()


class TorchRunner:
    """Runs a network, whose attention it replaces. Raises `ModelError` if the network caps attention logits."""

    def __init__(
        self,
        network: PreTrainedModel,
        cache: SlotKVCache,
        *,
        mask_id: int,
        compiled: bool,
        adapters: Sequence[GatedLoRA],
    ) -> None:
        capped = getattr(network.config.get_text_config(), "attn_logit_softcapping", None)
        if capped is not None:
            raise ModelError(f"The model caps its attention logits at {capped}, which the engine does not support.")
        network.set_attn_implementation(ATTENTION)
        self._cache = cache
        self._forward = forward_of(network, mask_id)
        self._network = network
        self._adapters = adapters
        self._attached: list[RemovableHandle] = [handle for lora in adapters for handle in lora.attach(network)]
        embeddings = embeddings_of(network)
        self.mask_samplers: list[MaskCorrector] = [MaskSampler(lora.sampler, *embeddings) for lora in adapters]
        self._hidden_MH: Tensor | None = None
        if adapters:
            self._attached.append(network.get_output_embeddings().register_forward_pre_hook(self._keep_hidden))
        # Compiled steps support no adapter.
        self._compiled = CompiledSteps(network, mask_id) if compiled and not adapters else None

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one forward, which writes the keys and values of all its positions to the cache."""
        layers = self._cache.layers
        if self._adapters:
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
        for number, lora in enumerate(self._adapters):
            where_L = (batch.adapter_N == number).nonzero().flatten()
            if len(where_L):
                masks_LH = lora.masks(batch.offset_N[where_L]).to(embedded_NH.dtype)
                embedded_NH = embedded_NH.index_copy(0, where_L, masks_LH)
                acting.enter_context(lora.at(where_L))
        return embedded_NH

    def _keep_hidden(self, _head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        [self._hidden_MH] = inputs[0]

    def wait_until_compiled(self) -> None:
        """Compile all missing steps now and wait for them. Returns at once if this runner compiles nothing."""
        if self._compiled:
            self._compiled.wait()

    def close(self) -> None:
        """Stop compiling, and detach the adapters from the network."""
        for handle in self._attached:
            handle.remove()
        if self._compiled:
            self._compiled.close()
