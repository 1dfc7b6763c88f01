"""Choose the tokens of a step: vLLM's own sampler draws at every row, and our rule decides which draws to keep.

The stock sampler keys its noise by seed and position. A draft and the row that verifies it share the position, so a
draft is right exactly if decoding one token at a time would draw the same token. With an adapter, a likely draft may
take the place of a draw (see `step_rule`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from mars_ray.vllm.runner.kernels.confidence import find_most_likely

if TYPE_CHECKING:
    from mars_ray.vllm.runner.model_state import MarsModelState, StepInFlight


class StepSampler:
    """Stock sampler with lookahead. Everything but the call itself goes to the stock sampler."""

    def __init__(self, stock: Any, state: MarsModelState) -> None:
        self._stock = stock
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def __call__(self, logits: Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Return the tokens of each request. `logits` [N, V] has one row for each known token, draft and mask."""
        step, adapter = self._state.step, self._state.adapter
        if adapter is None:
            logits[:, self._state.settings.mask_id] = -torch.inf
        if step is None:
            return self._stock(logits, input_batch)
        if adapter is not None:
            start_R = step.batch.row_start_R[:-1].long()
            adapter.correct(logits, step.layout, start_R, self._state.settings.masks)
        likely = find_most_likely(logits, step.batch, step.layout, 1 + self._state.settings.draft_positions)
        stock = self._stock(logits, input_batch)
        outcome = self._state.end_step(step, stock.sampled_token_ids, likely)
        return replace(
            stock,
            sampled_token_ids=outcome.token_RQ,
            logprobs_tensors=_shifted(stock.logprobs_tensors, step),
            num_sampled=outcome.num_sampled_R,
            num_rejected=outcome.num_rejected_R,
        )


def _shifted(logprobs: Any, step: StepInFlight) -> Any:
    """Return log-probabilities whose rows begin with the first kept token of each request."""
    if logprobs is None:
        return None
    rows = logprobs.logprobs.shape[0]
    first_R = (step.layout.known_R - 1).clamp(min=0)
    first_N = first_R.repeat_interleave(step.batch.row_start_R.diff(), output_size=rows)
    row_N = (torch.arange(rows, device=first_N.device) + first_N).clamp(max=rows - 1)
    return logprobs._replace(
        logprob_token_ids=logprobs.logprob_token_ids[row_N],
        logprobs=logprobs.logprobs[row_N],
        selected_token_ranks=logprobs.selected_token_ranks[row_N],
    )
