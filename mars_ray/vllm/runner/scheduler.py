"""Schedulers that give each request its draft positions, and share only blocks whose keys are certain."""

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from mars_ray.vllm.request_lookahead import lookahead_of
from mars_ray.vllm.runner.model_config import settings_of
from mars_ray.vllm.step_rule import draft_positions
from mars_ray.vllm.sure_tokens import SureTokens


def mars_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """Create the MARS subclass of vLLM's synchronous or asynchronous scheduler, whichever vLLM has chosen."""
    chosen = MarsAsyncScheduler if vllm_config.scheduler_config.async_scheduling else MarsScheduler
    return chosen(vllm_config=vllm_config, **arguments)


class _Lookahead(Scheduler):
    """The changes that lookahead makes to scheduling."""

    def __init__(self, *arguments: Any, vllm_config: VllmConfig, **named: Any) -> None:
        super().__init__(*arguments, vllm_config=vllm_config, **named)
        settings = settings_of(vllm_config)
        self._lookahead_of = partial(lookahead_of, block=settings.block, lenient=settings.lenient)
        self._sure = SureTokens()
        self.preemptions = 0
        """Number of preemptions so far."""
        coordinator = self.kv_cache_manager.coordinator
        coordinator.cache_blocks = self._capped(coordinator.cache_blocks)

    def _capped(self, cache_blocks: Callable[[Request, int], None]) -> Callable[[Request, int], None]:
        """Return a `cache_blocks` that skips tokens whose keys may belong to masks."""

        def capped(request: Request, num_computed_tokens: int) -> None:
            cache_blocks(request, self._sure.limit(request, num_computed_tokens))

        return capped

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule decoding first: a step must have positions for all known tokens of a request."""
        self.running.sort(key=lambda request: request.is_prefill_chunk)
        return super().schedule(throttle_prefills)

    def _preempt_request(self, *arguments: Any, **named: Any) -> None:
        self.preemptions += 1
        super()._preempt_request(*arguments, **named)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if not request.is_prefill_chunk:
                masks = self._lookahead_of(request.sampling_params).masks
                request.spec_token_ids = [-1] * draft_positions(1 + masks)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *arguments: Any, **named: Any
    ) -> tuple[list[int], bool]:
        self._sure.step_ended(request, request.num_tokens)
        return super()._update_request_with_output(request, new_token_ids, *arguments, **named)


class MarsScheduler(_Lookahead):
    """Scheduler that waits for each step."""


class MarsAsyncScheduler(_Lookahead, AsyncScheduler):
    """Scheduler that plans a step while another runs."""
