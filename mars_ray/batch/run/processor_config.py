"""Settings of a stage with engines in a user's Ray Data pipeline."""

from dataclasses import dataclass, replace
from typing import Literal

from mars_ray.adapter.decoding_model import open_decoding_model
from mars_ray.batch.rows.plain_format import PlainFormatSettings
from mars_ray.batch.run.engine_plan import EnginePlan, plan_engines
from mars_ray.batch.run.options import WorkerOptions
from mars_ray.engine.generation_defaults import generation_defaults
from mars_ray.engine.mode import DEFAULT_THRESHOLD, Mode
from mars_ray.engine.options import EngineTuning
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.errors import ConfigError
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.model.resolve import Name


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorConfig(EngineTuning):
    """Settings of a stage with engines. Stages of a pipeline with equal engine settings share their engines."""

    model: Name = "bundled"
    """`bundled`, `smollm2`, a folder, a .gguf file or a name on a hub; see `resolve_model`."""
    adapter: Name | None = None
    """Adapter that was trained for the model: `smollm2`, a folder, or a name on a hub."""
    threshold: float | None = None
    """Threshold for rows that do not set one. None means 1, at which every token is verified, or what `deadline_s` and
    `max_quality_loss` allow."""
    mode: Literal["ar", "threshold", "exact"] = "threshold"
    """Mode for rows that do not set one."""
    sampling: SamplingParams | None = None
    """Sampling parameters for rows that do not set them. None means those of the model's generation_config.json."""
    concurrency: int = 1
    """Number of engines."""
    cpus: float | None = None
    """Number of CPUs and threads of each engine. None divides a quarter of the cluster's CPUs among the engines,
    because the pipeline needs CPUs too."""
    gpus: float = 0.0
    """Number of GPUs of each engine."""
    dtype: DtypeOrAuto = "auto"
    """Number format of the weights."""
    batch_size: int = 64
    """Number of rows in a block. A block leaves the stage when its last row is done."""
    should_continue_on_error: bool = False
    """Put the error of a row into the column `error` and skip `postprocess` for it, instead of ending the job."""
    deadline_s: float | None = None
    """Time limit in seconds, from the first block to the last row. The threshold is lowered just enough to meet the
    limit. Requires `rows`."""
    rows: int | None = None
    """Number of rows that the pipeline will send to the stage."""
    max_quality_loss: float | None = None
    """Maximum loss of accuracy, according to the calibration. Without a deadline, the lowest threshold whose loss is
    within this limit is used."""

    @property
    def workers(self) -> WorkerOptions:
        """Options of the workers that run the engines."""
        return WorkerOptions(count=self.concurrency, cpus=self.cpus, gpus=self.gpus, dtype=self.dtype, **self.tuning)


def plan_stage(config: ProcessorConfig) -> tuple[EnginePlan, PlainFormatSettings]:
    """Return the engines and the row format of a stage. Raises an `InputError` for unusable settings."""
    if config.batch_size < 1:
        raise ConfigError(f"batch_size is {config.batch_size}, must be at least 1.")
    if config.deadline_s is not None and config.rows is None:
        raise ConfigError("deadline_s needs rows, the number of rows that the pipeline will send to the stage.")
    if config.mode not in list(Mode):
        raise ConfigError(f"mode is {config.mode!r}, must be one of {', '.join(Mode)}.")
    workers = config.workers
    workers.check()
    model = open_decoding_model(config.model, config.adapter, workers.dtype, workers.device)
    engines, decode = plan_engines(
        model,
        workers=workers,
        decode=DecodeParams(mode=Mode(config.mode), threshold=config.threshold),
        deadline_s=config.deadline_s,
        max_quality_loss=config.max_quality_loss,
    )
    if config.deadline_s is None:
        # Every request carries its own threshold, so stages with different thresholds can share engines.
        control = engines.control.model_copy(update={"ceiling": DEFAULT_THRESHOLD})
        engines = replace(engines, control=control)
    sampling = config.sampling or SamplingParams(**generation_defaults(model.base.folder))
    return engines, PlainFormatSettings(sampling=sampling, decode=decode)
