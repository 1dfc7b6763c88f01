"""Choose the tokens of a step: vLLM's own sampler draws at every row, and our rule decides which draws to keep.

The stock sampler keys its noise by seed and position. A draft and the row that verifies it share the position, so a
draft is right exactly if decoding one token at a time would draw the same token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from mars_ray.vllm.step_outcome import StepPredictions, take

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
            start_R = input_batch.cu_num_logits[: input_batch.num_reqs].long()
            adapter.correct(logits, step.layout, start_R, self._state.settings.masks)
        best_N, argmax_N = logits.max(dim=-1)
        confidence_N = (best_N.float() - logits.float().logsumexp(dim=-1)).exp()
        stock = self._stock(logits, input_batch)
        token_N = stock.sampled_token_ids[:, 0]
        width = int((input_batch.cu_num_logits_np[1:] - input_batch.cu_num_logits_np[:-1]).max())
        predictions = StepPredictions(
            _by_request(step, token_N, width),
            _by_request(step, confidence_N, width),
            _by_request(step, token_N == argmax_N, width),
        )
        outcome = take(step.layout, predictions, step.drafts_RK, step.threshold_R)
        self._state.end_step(predictions, outcome)
        return replace(
            stock,
            sampled_token_ids=outcome.token_RQ,
            logprobs_tensors=_shifted(stock.logprobs_tensors, outcome.first_row_R[step.request_N]),
            num_sampled=outcome.num_sampled_R.int(),
            num_rejected=outcome.num_rejected_R.int(),
        )


def _by_request(step: StepInFlight, values_N: Tensor, width: int) -> Tensor:
    """Return values of rows as [R, Q], with zeros after each request's rows."""
    values_RQ = values_N.new_zeros(step.slot_R.shape[0], width)
    values_RQ[step.request_N, step.column_N] = values_N
    return values_RQ


def _shifted(logprobs: Any, first_row_N: Tensor) -> Any:
    """Return log-probabilities whose rows begin with the first kept token of each request."""
    if logprobs is None:
        return None
    rows = first_row_N.shape[0]
    row_N = (torch.arange(rows, device=first_row_N.device) + first_row_N).clamp(max=rows - 1)
    return logprobs._replace(
        logprob_token_ids=logprobs.logprob_token_ids[row_N],
        logprobs=logprobs.logprobs[row_N],
        selected_token_ranks=logprobs.selected_token_ranks[row_N],
    )
