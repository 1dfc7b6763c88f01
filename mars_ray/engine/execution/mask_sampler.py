"""Let the masks of a step know the tokens before them, where their adapter has a sampler head.

What masks said on their own is corrected in place, row after row from left to right, before any token is chosen: so
whoever chooses, greedily, by a draw or within a grammar, reads corrected masks. The token taken to stand before a mask
is the likeliest one there, for behind another no mask is read (see `verify`).

Letters are those of `adapter.sampler_head`, and R rows of masks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.adapter.sampler_head import Candidates, SamplerHead, likeliest
from mars_ray.engine.execution.model_runner import ForwardOutput, MaskRow
from mars_ray.engine.scheduling.scheduler import ScheduledSequence


def mask_rows(scheduled: ScheduledSequence, picks: slice) -> list[MaskRow]:
    """Return the rows of masks of a sequence; `picks` begin at its last token."""
    rows = (MaskRow(picks.start + right, scheduled.mask_picks(picks, right)) for right in range(len(scheduled.masks)))
    return [row for row in rows if row.masks]


def embeddings_of(network: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return the weights of the input and the output embedding of a network, both [V, H]."""
    words, outputs = network.get_input_embeddings(), network.get_output_embeddings()
    return words.weight.detach(), outputs.weight.detach()


class MaskSampler:
    """Corrects masks by `head`, in a network with these input and output embeddings, both [V, H]."""

    def __init__(self, head: SamplerHead, embedding_VH: Tensor, unembedding_VH: Tensor) -> None:
        self._head, self._embedding_VH, self._unembedding_VH = head, embedding_VH, unembedding_VH

    @torch.inference_mode()
    def correct(self, output: ForwardOutput, rows: Sequence[MaskRow]) -> None:
        """Correct tokens, confidences and logits of `output` at the masks of `rows`."""
        assert output.hidden_MH is not None
        rows = sorted(rows, key=lambda row: -len(row.masks))
        # Masks with as many before them lie together, so that each step of the walk below is a slice.
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
        said_M = torch.tensor([output.confidences[pick] for pick in picks], device=logits_MV.device)
        # What all tokens have together is known from the likeliest one and its probability.
        log_total_M = candidates.log_total(logit_MC[:, 0] - said_M.log())
        confidence_M = (corrected_MC.amax(dim=-1) - log_total_M).exp()
        output.logits_MV[torch.tensor(picks, device=logits_MV.device)[:, None], token_MC] = corrected_MC
        for pick, token, confidence in zip(picks, candidates.token_M.tolist(), confidence_M.tolist(), strict=True):
            output.tokens[pick], output.confidences[pick] = token, confidence
