"""The options of `generate_files`."""

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
    """The worker processes of a job, each with an engine and its own copy of the model."""

    count: int | None = None
    """Number of workers; None takes as many as use the CPUs of the cluster, or its GPUs if `gpus` is set."""
    cpus: float | None = None
    """CPUs and threads of each worker; None shares the CPUs equally."""
    gpus: float = 0.0
    """GPUs of each worker."""
    dtype: DtypeOrAuto = "auto"
    """Number format of the weights. A resumed job keeps the format that `auto` chose at first."""

    @property
    def device(self) -> str:
        """The kind of device of the workers."""
        return "cuda" if self.gpus else "cpu"

    def check(self) -> None:
        """Raise a `ConfigError` for a number out of range."""
        if self.count is not None and self.count < 1:
            raise ConfigError(f"workers is {self.count}, must be at least 1.")
        if self.cpus is not None and not 0 < self.cpus < math.inf:
            raise ConfigError(f"cpus is {self.cpus}, must be above 0.")
        if not 0 <= self.gpus < math.inf:
            raise ConfigError(f"gpus is {self.gpus}, must be at least 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Input, output, model and settings of a job."""

    input: tuple[str, ...]
    """Files, folders and globs, as paths or URLs: JSONL (plain, gz, zst), parquet, or OpenAI batch files."""
    output: AnyPath
    """A local folder or one in a store. It is absent, empty, or holds this job, which is then resumed."""
    model: str = "bundled"
    """`bundled`, `smollm2`, a folder, a .gguf file or a name on a hub; see `resolve_model`."""
    adapter: str | None = None
    """An adapter that was trained for the model: 'smollm2', a folder, or a name on a hub."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling of rows without their own. OpenAI batch files do not use it."""
    sampling_of_model: bool = False
    """Take temperature, top_p, top_k and repetition penalty from the model's generation_config.json."""
    decode: DecodeParams = field(default_factory=DecodeParams)
    """Decoding of rows without their own."""
    template: str | None = None
    """Jinja template of the user's message, over the columns of a row."""
    prompt_column: str | None = None
    """Column with text or a conversation; None takes `messages`, then `prompt`."""
    trace: bool = False
    """Write the token ids, and the number of tokens from each forward."""
    format: FileFormat = "parquet"
    """Output format. OpenAI batch files are always answered in JSONL."""
    limit: int | None = None
    """Number of rows to answer, from the beginning of the input; None answers all."""
    new: bool = False
    """Rename an earlier job in the folder and start a new one."""
    retry_errors: bool = False
    """Answer the rows with errors again."""
    deadline_s: float | None = None
    """Time limit of the job. It lowers the threshold just enough to finish in time."""
    max_quality_loss: float | None = None
    """Largest accepted loss of accuracy, by calibration. Without a deadline, the lowest threshold within it is used."""
    workers: WorkerOptions = field(default_factory=WorkerOptions)

    def check(self) -> None:
        """Raise a `ConfigError` for a number out of range."""
        self.workers.check()
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit is {self.limit}, must be at least 1.")
