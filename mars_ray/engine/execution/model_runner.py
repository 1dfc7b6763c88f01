"""One forward of an unmodified HF decoder over the cache, compiled where a compiler is present.

In:    packed indices, the cache.
Out:   at each picked position the most likely token, its probability, and the logits.
Never: knows a sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.engine.execution.compiled import CompiledSteps
from mars_ray.engine.execution.forward import forward_of
from mars_ray.engine.execution.packer import Packed
from mars_ray.engine.kv.attention import ATTENTION
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.errors import ModelError


@dataclass(slots=True)
class Window:
    """What a forward gave at the M picked positions. The mask token has no chance at any."""

    tokens: list[int]
    """The most likely one."""
    confidences: list[float]
    """Its probability."""
    logits_MV: Tensor
    """float32."""


class Runner:
    """Runs `network`, whose attention it replaces."""

    def __init__(self, network: PreTrainedModel, cache: SlotKVCache, *, mask_id: int, compiled: bool) -> None:
        capped = getattr(network.config.get_text_config(), "attn_logit_softcapping", None)
        if capped is not None:
            raise ModelError(f"The model caps its attention logits at {capped}, which the engine's attention cannot.")
        network.set_attn_implementation(ATTENTION)
        self._cache = cache
        self._forward = forward_of(network, mask_id)
        self._compiled = CompiledSteps(network, mask_id) if compiled else None

    @torch.inference_mode()
    def run(self, packed: Packed) -> Window:
        """Run one forward; the keys and values of all its positions are in the cache afterwards."""
        decoding = (packed.id_N, packed.row_N, packed.position_N, packed.back_N, packed.where_RP, packed.pick_M)
        given = (self._cache.layers, *decoding, packed.column_C)
        if packed.prompts is not None:
            token_M, confidence_M, logits_MV = self._forward(*given, packed.prompts)
        else:
            forward = (self._compiled and self._compiled.get(packed.where_RP)) or self._forward
            token_M, confidence_M, logits_MV = forward(*given)
        return Window(token_M.tolist(), confidence_M.tolist(), logits_MV)

    def wait_until_compiled(self) -> None:
        """Wait until the steps that can be compiled are; return at once without a compiler."""
        if self._compiled:
            self._compiled.wait()

    def close(self) -> None:
        """Stop compiling."""
        if self._compiled:
            self._compiled.close()
