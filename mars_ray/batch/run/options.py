"""What to answer, with what, and where to: the options of `generate_files`, plain Python."""

import math
from dataclasses import dataclass, field

from mars_ray.batch.output.folder import FileFormat
from mars_ray.engine.options import EngineTuning
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.errors import ConfigError
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.storage.location import AnyPath


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(EngineTuning):
    """The processes that decode, and the engine in each of them."""

    count: int | None = None
    """Number of workers; None takes as many as use the CPUs of the cluster, or its GPUs if each takes some."""
    cpus: float | None = None
    """CPUs of each worker, and threads of its steps; None shares what there is."""
    gpus: float = 0.0
    """GPUs of each worker."""
    dtype: DtypeOrAuto = "auto"
    """Number format of the weights. A job that goes on keeps what `auto` was when it began."""

    @property
    def device(self) -> str:
        """The kind of device that decodes."""
        return "cuda" if self.gpus else "cpu"

    def check(self) -> None:
        """Raise a `ConfigError` for a number out of range."""
        if self.count is not None and self.count < 1:
            raise ConfigError(f"workers is {self.count}; it must be at least 1.")
        if self.cpus is not None and not 0 < self.cpus < math.inf:
            raise ConfigError(f"cpus is {self.cpus}; it must be above 0.")
        if not 0 <= self.gpus < math.inf:
            raise ConfigError(f"gpus is {self.gpus}; it must be at least 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What to answer, with what, and where to."""

    input: tuple[str, ...]
    """Files, folders, globs, as paths or URLs: JSONL (plain, gz, zst), parquet, or OpenAI batch files."""
    output: AnyPath
    """A folder, here or in a store, that is absent, empty, or holds this very job, which then goes on."""
    model: str = "bundled"
    """What `resolve_model` takes: `bundled`, `smollm2`, a folder, a .gguf file or a name on a hub."""
    adapter: str | None = None
    """'smollm2', which comes with the package, a folder, or a name on a hub: one that was trained for the model."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    sampling_of_model: bool = False
    """Temperature, top_p, top_k and repetition penalty are those of the model's generation_config.json instead."""
    """How rows are sampled that say nothing themselves. OpenAI batch files do not use it."""
    decode: DecodeParams = field(default_factory=DecodeParams)
    """How rows are decoded that say nothing themselves."""
    template: str | None = None
    """Jinja over the columns of a row; its text is the message of the user."""
    prompt_column: str | None = None
    """Column with text or a conversation; None looks for `messages`, then `prompt`."""
    trace: bool = False
    """Keep the ids of the tokens, and how many of them each forward gave."""
    format: FileFormat = "parquet"
    """File format of the output. OpenAI batch files are always answered as JSONL."""
    limit: int | None = None
    """Number of rows to answer, from the beginning of the input; None answers all."""
    new: bool = False
    """Put an earlier job in the folder aside and begin again."""
    retry_errors: bool = False
    """Do the rows with errors again."""
    deadline_s: float | None = None
    """Seconds until the job should end: it takes the highest threshold, up to its own, that does it."""
    max_quality_loss: float | None = None
    """Largest share of right answers that may be lost, by calibration. Without a deadline the lowest such threshold is
    taken."""
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    """The processes that decode."""

    def check(self) -> None:
        """Raise a `ConfigError` for a number out of range."""
        self.workers.check()
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit is {self.limit}; it must be at least 1.")
