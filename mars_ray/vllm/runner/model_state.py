"""State of the requests in a worker: what each step feeds them, and the drafts between steps.

Letters: R requests of a step, Q rows of logits of the widest request, N rows of logits of all requests, K masks.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.states import RequestState

from mars_ray.engine.stats.profile import GRID
from mars_ray.vllm.forward_log import ForwardLog
from mars_ray.vllm.lookahead_counters import LookaheadCounters
from mars_ray.vllm.request_lookahead import class_index, lookahead_of
from mars_ray.vllm.runner.attached_adapter import AttachedAdapter
from mars_ray.vllm.runner.model_config import settings_of
from mars_ray.vllm.runner.step_sampler import StepSampler
from mars_ray.vllm.step_layout import StepLayout, fed_ids, lay_out
from mars_ray.vllm.step_outcome import StepOutcome, StepPredictions
from mars_ray.vllm.step_times import StepTimes

STEPS_IN_FLIGHT = 2
"""Steps that asynchronous scheduling plans before it knows the tokens of the first."""


@dataclass(slots=True)
class StepInFlight:
    """A step between its forward and its sampler."""

    layout: StepLayout
    slot_R: Tensor
    request_N: Tensor
    """Request of each row of logits, int64."""
    column_N: Tensor
    """Place of the row among the rows of its request, int64."""
    fed_RQ: Tensor
    """Token ids at the rows of each request, int64."""
    drafts_RK: Tensor
    threshold_R: Tensor


class MarsModelState(DefaultModelState):
    """Lays out the positions of each step and keeps the drafts."""

    def __init__(
        self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: EncoderCache | None, device: torch.device
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.settings = settings_of(vllm_config)
        slots, masks = self.max_num_reqs, self.settings.masks
        self._drafts = torch.zeros(slots, masks, dtype=torch.int64, device=device)
        self._num_drafts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._masks = UvaBackedTensor(slots, dtype=torch.int64)
        self._threshold = UvaBackedTensor(slots, dtype=torch.float32)
        """Threshold of each request; NaN follows the engine."""
        self._floor = UvaBackedTensor(slots, dtype=torch.float32)
        self._class = UvaBackedTensor(slots, dtype=torch.int64)
        """Service class of each request, as an index into `_class_threshold`."""
        self._class_threshold = torch.full((len(self.settings.classes),), self.settings.threshold, device=device)
        self._mask_id_K = torch.tensor(self.settings.mask_ids, device=device)
        self.adapter: AttachedAdapter | None = None
        if self.settings.adapter:
            folder, base = Path(self.settings.adapter), Path(self.model_config.model)
            vocab_size = self.settings.mask_id
            self.adapter = AttachedAdapter(folder, base, model, self.max_num_tokens, vocab_size)
        self.step: StepInFlight | None = None
        self.counters = LookaheadCounters(masks, GRID, device)
        self.forwards = ForwardLog(masks, slots, device)
        self.step_times = StepTimes()
        self.refused = 0
        """Requests that asked for lookahead and decode one token at a time."""

    def set_thresholds(self, by_class: Mapping[str, float]) -> None:
        """Set the thresholds of requests that set none, by service class, from the next step on."""
        for name, threshold in by_class.items():
            self._class_threshold[self.settings.classes.index(name)] = threshold

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Take over a request, new or preempted before, in a slot."""
        super().add_request(req_index, new_req_data)
        lookahead = lookahead_of(new_req_data.sampling_params, self.settings.block)
        self._num_drafts[req_index] = 0
        self.forwards.begin(req_index)
        self._masks.np[req_index] = lookahead.masks
        self._threshold.np[req_index] = torch.nan if lookahead.threshold is None else lookahead.threshold
        self._floor.np[req_index] = lookahead.floor
        self._class.np[req_index] = class_index(new_req_data.sampling_params, self.settings.classes)
        self.refused += lookahead.is_refused

    def apply_staged_writes(self) -> None:
        """Bring the parameters of new requests to the device."""
        super().apply_staged_writes()
        for parameters in (self._masks, self._threshold, self._floor, self._class):
            parameters.copy_to_uva()

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        """Write the ids to feed into the batch."""
        inputs: dict[str, Any] = super().prepare_inputs(input_batch, req_states)
        self.step_times.begin(input_batch.req_ids, input_batch.num_tokens, time.monotonic())
        self.step = self._lay_out(input_batch, req_states) if input_batch.num_draft_tokens else None
        return inputs

    def _lay_out(self, batch: InputBatch, states: RequestState) -> StepInFlight:
        slot_R = batch.idx_mapping
        requests = batch.num_reqs
        rows_R = batch.cu_num_logits[: requests + 1].diff().long()
        positions_R = batch.query_start_loc[: requests + 1].diff().long()
        computed_R = states.num_computed_tokens.gpu[slot_R].long()
        total_R = states.total_len.gpu[slot_R].long()
        layout = lay_out(
            positions_R=positions_R,
            rows_R=rows_R,
            unfed_R=total_R - computed_R,
            drafts_R=self._num_drafts[slot_R],
            masks_R=self._masks.gpu[slot_R],
        )
        width = int((batch.cu_num_logits_np[1:] - batch.cu_num_logits_np[:-1]).max())
        first_R = computed_R + positions_R - rows_R
        place_RQ = first_R[:, None] + torch.arange(width, device=self.device)[None]
        known_RQ = states.all_token_ids.gpu[slot_R[:, None], place_RQ.clamp(max=self.max_model_len - 1)].long()
        drafts_RK = self._drafts[slot_R]
        ids_RQ = fed_ids(layout, known_RQ, drafts_RK, self._mask_id_K)

        row_N = batch.logits_indices
        request_N = torch.arange(requests, device=self.device).repeat_interleave(rows_R, output_size=row_N.shape[0])
        column_N = batch.expanded_local_pos.long()
        ids_N = ids_RQ[request_N, column_N].to(batch.input_ids.dtype)
        # A request with one row reads a part of its prompt, or decodes one token that vLLM has put in place.
        batch.input_ids[row_N] = torch.where(rows_R[request_N] > 1, ids_N, batch.input_ids[row_N])
        return StepInFlight(layout, slot_R, request_N, column_N, ids_RQ, drafts_RK, self._thresholds(slot_R, total_R))

    def _thresholds(self, slot_R: Tensor, total_R: Tensor) -> Tensor:
        """Return the threshold of each request in this step.

        Near the end of the context, later steps get fewer positions, which may not hold several known tokens. Nothing
        is accepted unverified there.
        """
        if self.settings.mode == "exact":
            return torch.ones_like(total_R, dtype=torch.float32)
        own_R = self._threshold.gpu[slot_R]
        of_class_R = self._class_threshold[self._class.gpu[slot_R]]
        threshold_R = torch.where(own_R.isnan(), of_class_R.maximum(self._floor.gpu[slot_R]), own_R)
        room = (1 + STEPS_IN_FLIGHT) * (1 + self.settings.draft_positions)
        return torch.where(self.max_model_len - total_R < room, 1.0, threshold_R)

    def end_step(self, predictions: StepPredictions, outcome: StepOutcome) -> None:
        """Keep the drafts of a step, and count it."""
        step = self.step
        assert step is not None
        self._drafts[step.slot_R] = outcome.drafts_RK
        self._num_drafts[step.slot_R] = outcome.num_drafts_R
        self.counters.add(step.layout, outcome)
        self.forwards.add(step.slot_R, step.layout, step.fed_RQ, step.threshold_R, predictions, outcome)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """Return the sampler that verifies drafts and accepts tokens at masks; it needs no rejection sampler."""
        return StepSampler(sampler, self), None
