"""State of the requests in a worker: what each step feeds them, and the drafts between steps."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.states import RequestState

from mars_ray.engine.stats.grid import GRID
from mars_ray.vllm.forward_log import ForwardLog
from mars_ray.vllm.lookahead_counters import LookaheadCounters
from mars_ray.vllm.request_lookahead import class_index, lookahead_of
from mars_ray.vllm.runner.attached_adapter import AttachedAdapter
from mars_ray.vllm.runner.kernels.confidence import MostLikely
from mars_ray.vllm.runner.kernels.layout import (
    KnownTokens,
    LayoutRule,
    NextDrafts,
    StepBatch,
    StepLayout,
    WantedLookahead,
    lay_out,
)
from mars_ray.vllm.runner.kernels.outcome import StepOutcome, take
from mars_ray.vllm.runner.model_config import settings_of
from mars_ray.vllm.runner.step_sampler import StepSampler
from mars_ray.vllm.start_checks import check_backends
from mars_ray.vllm.step_times import StepTimes

WARM_UP = re.compile(r"_(v2_mixed_)?warmup")
"""Beginning of the ids of requests by which vLLM warms up."""
STEPS_IN_FLIGHT = 2
"""Steps that asynchronous scheduling plans before it knows the tokens of the first."""


class StepInFlight(NamedTuple):
    """A step between its forward and its sampler."""

    batch: StepBatch
    layout: StepLayout


class MarsModelState(DefaultModelState):
    """Lays out the positions of each step and keeps the drafts."""

    def __init__(
        self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: EncoderCache | None, device: torch.device
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        check_backends(vllm_config.compilation_config.static_forward_context.values())
        self.settings = settings_of(vllm_config)
        slots, masks = self.max_num_reqs, self.settings.masks
        self._drafts = NextDrafts(
            torch.zeros(slots, masks, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
        )
        # The fields of `WantedLookahead`.
        self._masks = UvaBackedTensor(slots, dtype=torch.int32)
        self._threshold = UvaBackedTensor(slots, dtype=torch.float32)
        self._floor = UvaBackedTensor(slots, dtype=torch.float32)
        self._temperature = UvaBackedTensor(slots, dtype=torch.float32)
        self._class = UvaBackedTensor(slots, dtype=torch.int32)
        self._class_threshold = torch.full((len(self.settings.classes),), self.settings.threshold, device=device)
        self.adapter: AttachedAdapter | None = None
        if self.settings.adapter:
            folder, base = Path(self.settings.adapter), Path(self.model_config.model)
            vocab_size = self.settings.mask_id
            self.adapter = AttachedAdapter(folder, base, model, self.max_num_tokens, vocab_size)
        self.step: StepInFlight | None = None
        self.refused = 0
        """Requests that asked for lookahead and decode one token at a time."""
        self._warm = False
        """Whether a request of a caller has come. Those by which vLLM warms up do not count."""
        self._begin_counts()

    def _begin_counts(self) -> None:
        slots, masks = self.max_num_reqs, self.settings.masks
        self.counters = LookaheadCounters(masks, slots, GRID, self.device)
        self.forwards = ForwardLog(masks, slots, self.device)
        self.step_times = StepTimes()

    def set_thresholds(self, by_class: Mapping[str, float]) -> None:
        """Set the thresholds of requests that set none, by service class, from the next step on."""
        for name, threshold in by_class.items():
            self._class_threshold[self.settings.classes.index(name)] = threshold

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Take over a request, new or preempted before, in a slot."""
        super().add_request(req_index, new_req_data)
        if not self._warm and not WARM_UP.match(new_req_data.req_id):
            self._warm = True
            self._begin_counts()
        lookahead = lookahead_of(new_req_data.sampling_params, self.settings.block, lenient=self.settings.lenient)
        self._drafts.count_S[req_index] = 0
        self.forwards.begin(req_index)
        self._masks.np[req_index] = lookahead.masks
        self._threshold.np[req_index] = -1.0 if lookahead.threshold is None else lookahead.threshold
        self._floor.np[req_index] = lookahead.floor
        self._temperature.np[req_index] = lookahead.temperature
        self._class.np[req_index] = class_index(new_req_data.sampling_params, self.settings.classes)
        self.refused += lookahead.is_refused

    def apply_staged_writes(self) -> None:
        """Bring the parameters of new requests to the device."""
        super().apply_staged_writes()
        for parameters in (self._masks, self._threshold, self._floor, self._temperature, self._class):
            parameters.copy_to_uva()

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        """Write the ids to feed into the batch."""
        inputs: dict[str, Any] = super().prepare_inputs(input_batch, req_states)
        self.step_times.begin(input_batch.req_ids, input_batch.num_tokens, time.monotonic())
        self.step = self._lay_out(input_batch, req_states) if input_batch.num_draft_tokens else None
        return inputs

    def _lay_out(self, vllm_batch: InputBatch, states: RequestState) -> StepInFlight:
        settings = self.settings
        batch = StepBatch(
            vllm_batch.idx_mapping, vllm_batch.query_start_loc, vllm_batch.cu_num_logits, vllm_batch.input_ids
        )
        known = KnownTokens(states.num_computed_tokens.gpu, states.total_len.gpu, states.all_token_ids.gpu)
        wanted = WantedLookahead(
            self._masks.gpu,
            self._threshold.gpu,
            self._floor.gpu,
            self._temperature.gpu,
            self._class.gpu,
            self._class_threshold,
        )
        room = (1 + STEPS_IN_FLIGHT) * (1 + settings.draft_positions)
        rule = LayoutRule(
            mask_id=settings.mask_id,
            mask_step=settings.mask_step,
            is_exact=settings.mode == "exact",
            last_total=self.max_model_len - room,
        )
        return StepInFlight(batch, lay_out(batch, known, self._drafts, wanted, rule))

    def end_step(self, step: StepInFlight, sampled_N: Tensor, likely: MostLikely) -> StepOutcome:
        """Return the outcome of a step. Keep its drafts, and count and log it."""
        return take(
            step.batch,
            step.layout,
            sampled_N,
            likely,
            self._drafts,
            self.counters,
            self.forwards,
            lenient=self.settings.lenient,
        )

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """Return the sampler that verifies drafts and accepts tokens at masks; it needs no rejection sampler."""
        return StepSampler(sampler, self), None
