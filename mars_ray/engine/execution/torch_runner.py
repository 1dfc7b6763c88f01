"""Run an unmodified HF decoder through torch, one operation at a time: slow, and correct for any network and device.

On CPUs the kernels are faster, on GPUs vLLM is.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.adapter.sampler_head import Candidates, SamplerHead, likeliest
from mars_ray.engine.execution.model_runner import ForwardOutput, MaskRow
from mars_ray.engine.kv.attention import ATTENTION, slot_views
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.errors import ModelError


def to_host(token_M: Tensor, confidence_M: Tensor) -> tuple[list[int], list[float]]:
    """Copy the likeliest tokens and their probabilities to the host.

    A greedy step without an adapter waits for the device only here.
    """
    return token_M.tolist(), confidence_M.tolist()


class MaskSampler:
    """Corrects masks with the sampler head `head` and the input and output embeddings of the network, each [V, H].

    Letters are those of `adapter.sampler_head`, and R for rows of masks.
    """

    def __init__(self, head: SamplerHead, embedding_VH: Tensor, unembedding_VH: Tensor) -> None:
        self._head = head
        self._embedding_VH = embedding_VH
        self._unembedding_VH = unembedding_VH

    @torch.inference_mode()
    def correct(self, output: ForwardOutput, rows: Sequence[MaskRow]) -> None:
        """Correct the tokens, confidences and logits of `output` at the masks of `rows`, in place."""
        assert output.hidden_MH is not None
        rows = sorted(rows, key=lambda row: -len(row.masks))
        # Masks with the same offset in their rows are contiguous, so each iteration of the loop below reads a slice.
        longest = len(rows[0].masks)
        counts = [sum(len(row.masks) > offset for row in rows) for offset in range(longest)]
        picks = [row.masks[offset] for offset, count in enumerate(counts) for row in rows[:count]]
        logits_MV = output.logits_MV[picks]
        before_R = torch.tensor([output.tokens[row.behind] for row in rows], device=logits_MV.device)
        logit_MC, token_MC = likeliest(logits_MV)
        candidate_MCH = self._unembedding_VH[token_MC].float()
        read_MW = self._head.read(output.hidden_MH[picks].float())
        corrected_MC = torch.empty_like(logit_MC)
        start = 0
        for count in counts:
            here = slice(start, start := start + count)
            before_RH = self._embedding_VH[before_R[:count]].float()
            corrected_MC[here] = logit_MC[here] + self._head.correction(read_MW[here], before_RH, candidate_MCH[here])
            before_R = token_MC[here].gather(1, corrected_MC[here].argmax(dim=-1, keepdim=True))[:, 0]
        candidates = Candidates(token_MC, logit_MC, corrected_MC)
        plain_confidence_M = torch.tensor([output.confidences[pick] for pick in picks], device=logits_MV.device)
        # The logit and the probability of the likeliest token give the log-sum-exp over the whole vocabulary.
        log_total_M = candidates.log_total(logit_MC[:, 0] - plain_confidence_M.log())
        confidence_M = (corrected_MC.amax(dim=-1) - log_total_M).exp()
        output.logits_MV[torch.tensor(picks, device=logits_MV.device)[:, None], token_MC] = corrected_MC
        for pick, token, confidence in zip(picks, candidates.token_M.tolist(), confidence_M.tolist(), strict=True):
            output.tokens[pick] = token
            output.confidences[pick] = confidence


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
        self._network = network
        self._mask_id = mask_id
        self._adapters: Sequence[TorchAdapter] = ()
        self._attached: dict[TorchAdapter, list[RemovableHandle]] = {}
        """Hooks of each adapter in the network."""
        self._keeping: RemovableHandle | None = None
        """Hook that keeps the hidden states for the sampler heads."""
        self._hidden_MH: Tensor | None = None

    def pack(self, lora: GatedLoRA) -> TorchAdapter:
        """Return a copy of an adapter in the form that `use` takes. Any thread may call it, next to a forward.

        Raises `AdapterError` if the adapter does not fit the network.
        """
        lora.check_fits(self._network)
        copied = deepcopy(lora).to(self._network.device)  # the same adapter may have two names
        embeddings = (self._network.get_input_embeddings(), self._network.get_output_embeddings())
        sampler = MaskSampler(copied.sampler, *(embedding.weight.detach() for embedding in embeddings))
        return TorchAdapter(copied, sampler)

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

    def run(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one forward, which writes the keys and values of all its positions to the cache."""
        token_M, confidence_M, logits_MV = self.forward(batch)
        return ForwardOutput(*to_host(token_M, confidence_M), logits_MV, self._hidden_MH)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Run one forward; return the likeliest tokens, their probabilities and the logits, still on the device."""
        with ExitStack() as acting:
            logits: Tensor = self._network(
                **self._inputs(batch, acting),
                position_ids=batch.position_N[None],
                use_cache=False,
                logits_to_keep=batch.pick_M,
                layers=self._cache.layers,
                batch=batch,
                views=slot_views(batch, self._network.dtype),
            ).logits
        logits_MV = logits[0].float()
        logits_MV[:, self._mask_id] = -torch.inf
        top_M, token_M = logits_MV.max(dim=-1)
        return token_M, (top_M - logits_MV.logsumexp(dim=-1)).exp(), logits_MV

    def _inputs(self, batch: ForwardBatch, acting: ExitStack) -> dict[str, Tensor]:
        """Return the token ids of a batch, or its embeddings if there are adapters.

        Each adapter acts on its masks until `acting` closes.
        """
        if not self._adapters:
            return {"input_ids": batch.id_N[None]}
        embedded_NH: Tensor = self._network.get_input_embeddings()(batch.id_N)
        for number, adapter in enumerate(self._adapters):
            where_L = (batch.adapter_N == number).nonzero().flatten()
            if len(where_L):
                masks_LH = adapter.lora.masks(batch.offset_N[where_L]).to(embedded_NH.dtype)
                embedded_NH = embedded_NH.index_copy(0, where_L, masks_LH)
                acting.enter_context(adapter.lora.at(where_L))
        return {"inputs_embeds": embedded_NH[None]}

    def _keep_hidden(self, _head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        [self._hidden_MH] = inputs[0]

    def close(self) -> None:
        """Detach the adapters from the network."""
        self.use(())
