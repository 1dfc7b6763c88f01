"""Run a decoder of the Llama family on a CPU through the compiled kernels."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.engine.execution.fused_mask_sampler import FusedMaskSampler
from mars_ray.engine.execution.mask_sampler import embeddings_of
from mars_ray.engine.execution.model_runner import ForwardOutput, MaskCorrector
from mars_ray.engine.kernels.decoder import FusedDecoder
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.engine.options import Quantize


class CPURunner:
    """Runs packed copies of the network's weights. Raises `KernelError` if the kernels do not support the network."""

    def __init__(
        self,
        network: PreTrainedModel,
        cache: SlotKVCache,
        *,
        mask_id: int,
        quantize: Quantize | None,
        consume: bool,
        adapters: Sequence[GatedLoRA],
    ) -> None:
        # Read before `FusedDecoder` frees the weights of the network.
        embeddings = embeddings_of(network)
        self._decoder = FusedDecoder(network, mask_id=mask_id, quantize=quantize, consume=consume, adapters=adapters)
        self.mask_samplers: list[MaskCorrector] = [FusedMaskSampler(lora.sampler, *embeddings) for lora in adapters]
        self._cache = cache

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one forward, which writes the keys and values of all its positions to the cache."""
        return ForwardOutput(*self._decoder.forward(self._cache.layers, batch))

    def wait_until_compiled(self) -> None:
        """Return at once, because the kernels are compiled before the first step."""

    def close(self) -> None:
        """Do nothing, because nothing runs in the background."""
