"""An engine of vLLM that serves requests, with the state and the thresholds that heartbeats need.

The state combines vLLM's own counts with the records of the plug-in.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from mars_ray.engine.service_class import STANDARD
from mars_ray.engine.stats.state import ClassState, EngineState
from mars_ray.vllm.engine.records import Records
from mars_ray.vllm.engine_counts import EngineCounts
from mars_ray.vllm.forward_log import LoggedForward

log = logging.getLogger(__name__)


class ServerEngine(Protocol):
    """The part of vLLM's `EngineClient` that the agent uses."""

    vllm_config: Any

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of every worker."""


class ServedEngine:
    """One engine. All its requests count as class `standard`, because vLLM's counts know no classes."""

    def __init__(
        self,
        client: ServerEngine,
        records: Records,
        counts: EngineCounts,
        *,
        threshold: float,
        block: int,
    ) -> None:
        self._client = client
        self._records = records
        self._counts = counts
        self._threshold = threshold
        self._block = block
        self._changes = 0
        self._known = self._arrived = 0
        """Requests that vLLM counted as running, waiting or ended at the last state, and all that have come."""
        self._setting: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return self._counts.running + self._counts.waiting == 0

    async def state(self) -> EngineState:
        """Return the state of the engine. Raises vLLM's error if the engine is gone."""
        [record, *_] = await self._client.collective_rpc("mars_record")
        [forwards, *_] = await self._client.collective_rpc("mars_forwards")
        self._records.read(record, (LoggedForward(*forward) for forward in forwards))
        counts, config = self._counts, self._client.vllm_config
        cache = config.cache_config
        return EngineState(
            max_num_seqs=config.scheduler_config.max_num_seqs,
            classes=(self._class_state(counts),),
            tokens_running=max(0, counts.generation_tokens - counts.ended_tokens),
            kv_cache_usage=counts.kv_cache_usage,
            kv_tokens=int(counts.kv_cache_usage * (cache.num_gpu_blocks or 0) * cache.block_size),
            steps=sum(total["steps"] for total in record["step_times"].values()),
            preemptions=counts.preemptions,
            threshold_changes=self._changes,
            block=self._block,
            profile=self._records.points(),
            step_time=self._records.step_time(),
            ttft_p95_s=counts.ttft_p95_s,
            tpot_p95_s=counts.tpot_p95_s,
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

    def _class_state(self, counts: EngineCounts) -> ClassState:
        return ClassState(
            name=STANDARD,
            threshold=self._threshold,
            running=counts.running,
            waiting=counts.waiting,
            arrived=self._arrivals(counts),
            prompt_tokens=counts.prompt_tokens,
            ended=counts.ended,
            tokens=counts.ended_tokens,
            cached_tokens=counts.cached_tokens,
        )

    def _arrivals(self, counts: EngineCounts) -> int:
        """Return the requests that have come. Those that are aborted leave vLLM without being counted as ended."""
        known = counts.running + counts.waiting + counts.ended
        self._arrived += max(0, known - self._known)
        self._known = known
        return self._arrived
