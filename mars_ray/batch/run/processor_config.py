"""What a stage of somebody's own pipeline decodes with, plain Python."""

from dataclasses import dataclass, field, replace
from typing import Literal

from mars_ray.batch.rows.plain_format import PlainFormatSettings
from mars_ray.batch.run.engine_plan import EnginePlan, plan_engines
from mars_ray.batch.run.options import WorkerOptions
from mars_ray.engine.mode import DEFAULT_THRESHOLD, Mode
from mars_ray.engine.options import EngineTuning
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.errors import ConfigError
from mars_ray.model.dtype import DtypeOrAuto


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorConfig(EngineTuning):
    """A stage with engines of its own, which it shares with the stages of the job that ask for the same engines."""

    model: str = "bundled"
    """What `resolve_model` takes: `bundled`, `smollm2`, a folder, a .gguf file or a name on a hub."""
    adapter: str | None = None
    """'smollm2', which comes with the package, a folder, or a name on a hub: one that was trained for the model."""
    threshold: float = DEFAULT_THRESHOLD
    """Confidence that a token ahead needs, for rows that name none; at 1 each is verified."""
    mode: Literal["ar", "threshold", "exact"] = "threshold"
    """The mode of rows that name none."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How rows are sampled that say nothing themselves."""
    concurrency: int = 1
    """Number of engines."""
    cpus: float | None = None
    """CPUs that each engine asks Ray for, and threads of its steps; None asks for a share of the whole CPUs in a
    quarter of the cluster, for the pipeline needs some, too."""
    gpus: float = 0.0
    """GPUs of each engine."""
    dtype: DtypeOrAuto = "auto"
    """Number format of the weights."""
    batch_size: int = 64
    """Rows of a block. It leaves the stage when its last row is done."""
    should_continue_on_error: bool = False
    """A row without an answer says why in the column `error`, and passes `postprocess` by; else it ends the job."""
    deadline_s: float | None = None
    """Seconds from the first block until the last row should be done: the stage takes the highest threshold, up to its
    own, that does it. Needs `rows`."""
    rows: int | None = None
    """Rows that the pipeline sends through the stage: with a deadline, what is left has to be known."""
    max_quality_loss: float | None = None
    """Largest share of right answers that may be lost, by calibration. Without a deadline the lowest such threshold is
    taken."""

    @property
    def workers(self) -> WorkerOptions:
        """The engines."""
        return WorkerOptions(count=self.concurrency, cpus=self.cpus, gpus=self.gpus, dtype=self.dtype, **self.tuning)


def plan_stage(config: ProcessorConfig) -> tuple[EnginePlan, PlainFormatSettings]:
    """Return the engines of the stage, and what its rows are answered by. Raises an `InputError`."""
    if config.batch_size < 1:
        raise ConfigError(f"batch_size is {config.batch_size}; it must be at least 1.")
    if config.deadline_s is not None and config.rows is None:
        raise ConfigError("deadline_s needs rows: how many the pipeline sends through the stage.")
    if config.mode not in list(Mode):
        raise ConfigError(f"mode is {config.mode!r}; choose one of {', '.join(Mode)}.")
    engines, decode = plan_engines(
        model=config.model,
        adapter=config.adapter,
        workers=config.workers,
        decode=DecodeParams(mode=Mode(config.mode), threshold=config.threshold),
        deadline_s=config.deadline_s,
        max_quality_loss=config.max_quality_loss,
    )
    if config.deadline_s is None:
        # Every row names its threshold, so engines with other defaults are the same engines.
        control = engines.control.model_copy(update={"ceiling": DEFAULT_THRESHOLD})
        engines = replace(engines, control=control)
    return engines, PlainFormatSettings(sampling=config.sampling, decode=decode)
