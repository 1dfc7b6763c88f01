"""One forward of an unmodified HF decoder over the cache, compiled where a compiler is present.

In:    packed indices, the cache.
Out:   at each picked position the most likely token, its probability, and the logits.
Never: knows a sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.engine.attention import ATTENTION, Layers, Rectangle, visible
from mars_ray.engine.compiled import CompiledSteps, Forward
from mars_ray.engine.kv_cache import SlotKVCache
from mars_ray.engine.packer import Packed, Prompts
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
        self._compiled = CompiledSteps(self._forward, network) if compiled else None

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


def forward_of(network: PreTrainedModel, mask_id: int) -> Forward:
    """Return the forward of `network` as a function of tensors: tokens [M], their probabilities [M], logits [M, V]."""

    def forward(
        layers: Layers,
        id_N: Tensor,
        row_N: Tensor,
        position_N: Tensor,
        back_N: Tensor,
        where_RP: Tensor,
        pick_M: Tensor,
        column_C: Tensor,
        prompts: Prompts | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits: Tensor = network(
            input_ids=id_N[None],
            position_ids=position_N[None],
            use_cache=False,
            logits_to_keep=pick_M,
            layers=layers,
            row_N=row_N,
            position_N=position_N,
            back_N=back_N,
            decoding=Rectangle(where_RP, visible(where_RP, position_N, column_C, network.dtype)),
            prompts=prompts and prompts.rectangle(position_N, network.dtype),
            prompt_row_L=prompts and prompts.row_L,
        ).logits
        logits_MV = logits[0].float()
        mask_V = torch.arange(logits_MV.shape[-1], device=logits_MV.device) == mask_id
        logits_MV = logits_MV.masked_fill(mask_V, -torch.inf)
        top_M, token_M = logits_MV.max(dim=-1)
        return token_M, (top_M - logits_MV.logsumexp(dim=-1)).exp(), logits_MV

    return forward
