"""Correct the logits of masks, given the tokens before them, with the sampler head of their adapter.

Logits are corrected in place, from left to right, before any token is chosen, so greedy decoding, sampling and grammars
all read corrected logits. The head assumes that the token before a mask is the likeliest one there; if another token is
chosen, the masks after it are not used (see `verify`).

Letters are those of `adapter.sampler_head`, and R for rows of masks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.adapter.sampler_head import Candidates, SamplerHead, likeliest
from mars_ray.engine.execution.model_runner import ForwardOutput, MaskRow
from mars_ray.engine.scheduling.scheduler import ScheduledSequence


def mask_rows(scheduled: ScheduledSequence, picks: slice) -> list[MaskRow]:
    """Return the nonempty rows of masks of a sequence. `picks` are the picks of the sequence from its last token on."""
    count = len(scheduled.masks)
    rows = (MaskRow(picks.start + drafts, scheduled.mask_picks(picks, drafts)) for drafts in range(count))
    return [row for row in rows if row.masks]


def embeddings_of(network: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return the input and output embeddings of a network, both [V, H]."""
    return network.get_input_embeddings().weight.detach(), network.get_output_embeddings().weight.detach()


class MaskSampler:
    """Corrects masks with the sampler head `head` and the input and output embeddings of the network, each [V, H]."""

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
