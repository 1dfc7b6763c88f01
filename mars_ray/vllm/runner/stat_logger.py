"""The stat logger that vLLM makes for each engine. It counts for the agent, and logs nothing."""

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from mars_ray.vllm.engine_counts import COUNTS, EngineCounts, IterationStats, SchedulerStats


class MarsStatLogger(StatLoggerBase):
    """Fills the `EngineCounts` of its engine."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:  # noqa: ARG002  # vLLM passes it
        self._counts = COUNTS[vllm_config.instance_id] = EngineCounts()

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, *_: object, **__: object
    ) -> None:
        """Add the figures of one step."""
        self._counts.record(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Do nothing."""
