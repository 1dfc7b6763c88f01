"""The engine of a running `vllm serve`, with the state and the thresholds that heartbeats need.

The state combines vLLM's Prometheus metrics with the records of the plug-in.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mars_ray.engine.service_class import STANDARD
from mars_ray.engine.stats.state import ClassState, EngineState
from mars_ray.vllm.agent.served_metrics import RecentLatency, ServedMetrics
from mars_ray.vllm.engine.records import Records
from mars_ray.vllm.forward_log import LoggedForward

log = logging.getLogger(__name__)


class ServerEngine(Protocol):
    """The part of vLLM's `EngineClient` that the agent uses."""

    vllm_config: Any

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of every worker."""


class ServedEngine:
    """One engine. All its requests count as class `standard`, because vLLM's metrics know no classes."""

    def __init__(
        self,
        client: ServerEngine,
        records: Records,
        read_metrics: Callable[[], ServedMetrics],
        *,
        threshold: float,
        block: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._records = records
        self._read_metrics = read_metrics
        self._threshold = threshold
        self._block = block
        self._clock = clock
        self._changes = 0
        self._setting: asyncio.Task[None] | None = None
        self._ttft_s = RecentLatency()
        self._tpot_s = RecentLatency()

    async def state(self) -> EngineState:
        """Return the state of the engine. Raises vLLM's error if the engine is gone."""
        [record, *_] = await self._client.collective_rpc("mars_record")
        [forwards, *_] = await self._client.collective_rpc("mars_forwards")
        self._records.read(record, (LoggedForward(*forward) for forward in forwards))
        metrics, config = self._read_metrics(), self._client.vllm_config
        cache = config.cache_config
        usage = min(1.0, metrics.total("kv_cache_usage_perc"))
        ended_tokens = metrics.total("request_generation_tokens_sum")
        now_s = self._clock()
        return EngineState(
            max_num_seqs=config.scheduler_config.max_num_seqs,
            classes=(self._class_state(metrics, int(ended_tokens)),),
            tokens_running=max(0, int(metrics.total("generation_tokens_total") - ended_tokens)),
            kv_cache_usage=usage,
            kv_tokens=int(usage * (cache.num_gpu_blocks or 0) * cache.block_size),
            steps=sum(total["steps"] for total in record["step_times"].values()),
            preemptions=int(metrics.total("num_preemptions_total")),
            threshold_changes=self._changes,
            block=self._block,
            profile=self._records.points(),
            step_time=self._records.step_time(),
            ttft_p95_s=self._ttft_s.p95(now_s, metrics.buckets("time_to_first_token_seconds")),
            tpot_p95_s=self._tpot_s.p95(now_s, metrics.buckets("request_time_per_output_token_seconds")),
        )

    def set_thresholds(self, by_class: Mapping[str, float], /) -> None:
        """Set the threshold of all requests that set none, from the next step on."""
        self._setting = asyncio.create_task(self._set(by_class[STANDARD]))

    async def _set(self, threshold: float) -> None:
        try:
            await self._client.collective_rpc("set_mars_threshold", args=(threshold,))
        except Exception as error:  # the next state has the old threshold, so the next heartbeat tries again
            log.error("vLLM did not take the threshold %s: %s", threshold, error)
            return
        self._threshold = threshold
        self._changes += 1

    def _class_state(self, metrics: ServedMetrics, ended_tokens: int) -> ClassState:
        running = int(metrics.total("num_requests_running"))
        waiting = int(metrics.total("num_requests_waiting"))
        ended = int(metrics.total("request_success_total"))
        return ClassState(
            name=STANDARD,
            threshold=self._threshold,
            running=running,
            waiting=waiting,
            arrived=running + waiting + ended,
            prompt_tokens=int(metrics.total("prompt_tokens_total")),
            ended=ended,
            tokens=ended_tokens,
        )
