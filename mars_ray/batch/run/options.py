"""Options of `generate_files`."""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mars_ray.batch.output.folder import FileFormat
from mars_ray.engine.checked_fields import Texts, check_fields
from mars_ray.engine.options import EngineTuning
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.errors import ConfigError, OutputError
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.model.resolve import Name
from mars_ray.storage.location import PathOrUrl


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(EngineTuning):
    """Options of a job's worker processes. Each worker has an engine and its own copy of the model."""

    count: int | None = None
    """Number of workers. None starts enough workers to use the CPUs of the cluster, or its GPUs if `gpus` is set."""
    cpus: float | None = None
    """Number of CPUs and threads of each worker. None divides the CPUs equally among the workers."""
    gpus: float = 0.0
    """Number of GPUs of each worker."""
    dtype: DtypeOrAuto = "auto"
    """Number format of the weights. A resumed job keeps the format that `auto` chose when the job began."""

    @property
    def device(self) -> str:
        """Device type of the workers."""
        return "cuda" if self.gpus else "cpu"

    def check(self) -> None:
        """Raise a `ConfigError` for a number out of range."""
        if self.count is not None and self.count < 1:
            raise ConfigError(f"workers is {self.count}, must be at least 1.")
        if self.cpus is not None and not 0 < self.cpus < math.inf:
            raise ConfigError(f"cpus is {self.cpus}, must be above 0.")
        if not 0 <= self.gpus < math.inf:
            raise ConfigError(f"gpus is {self.gpus}, must be at least 0.")
        if self.tensor_parallel_size > 1 and self.gpus != self.tensor_parallel_size:
            raise ConfigError(
                f"gpus is {self.gpus:g} and tensor_parallel_size {self.tensor_parallel_size}; set gpus to "
                f"{self.tensor_parallel_size}, because a worker needs a GPU for each part of the model."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Input, output, model and settings of a job. Raises `ConfigError` for an option of a wrong type."""

    input: Texts
    """Files, folders and globs, as paths or URLs: JSONL (plain, gz, zst), parquet, or OpenAI batch files."""
    output: PathOrUrl
    """Output folder, on disk or in a store. The folder must be missing, be empty, or hold this job, which is then
    resumed."""
    model: Name = "bundled"
    """`bundled`, `smollm2`, a folder, a .gguf file or a name on a hub; see `resolve_model`."""
    adapter: Name | None = None
    """Adapter that was trained for the model: `smollm2`, a folder, or a name on a hub."""
    sampling: SamplingParams | None = None
    """Sampling parameters for rows that do not set them. None means those of the model's generation_config.json.
    OpenAI batch files set their own, so they refuse others."""
    sampling_of_model: bool = False
    """Take temperature, top_p, top_k and repetition penalty from the model's generation_config.json, the others from
    `sampling`."""
    decode: DecodeParams = field(default_factory=DecodeParams)
    """Decoding parameters for rows that do not set them."""
    template: str | None = None
    """Jinja template for the user's message. Its variables are the columns of a row."""
    prompt_column: str | None = None
    """Column that holds a text or a conversation. None means `messages`, or `prompt` in rows without `messages`."""
    trace: bool = False
    """Also write the token ids of each answer, and the number of tokens that each forward accepted."""
    format: FileFormat = "parquet"
    """Output format. OpenAI batch files are always answered in JSONL."""
    limit: int | None = None
    """Number of rows to answer, from the beginning of the input. None answers all rows."""
    new: bool = False
    """Rename the folder if it holds an earlier job, and start a new job."""
    retry_errors: bool = False
    """Answer the rows with errors again."""
    deadline_s: float | None = None
    """Time limit of the job in seconds. The threshold is lowered just enough to finish in time."""
    max_quality_loss: float | None = None
    """Maximum loss of accuracy, according to the calibration. Without a deadline, the lowest threshold whose loss is
    within this limit is used."""
    workers: WorkerOptions = field(default_factory=WorkerOptions)

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self) -> None:
        """Raise a `ConfigError` for a number out of range."""
        self.workers.check()
        if isinstance(self.output, Path):
            try:
                self.output.absolute().exists()
            except OSError as error:  # such as a name that is too long
                raise OutputError(f"Cannot use {self.output}: {error.strerror}. Give another output folder.") from error
        if self.template is not None and self.prompt_column is not None:
            raise ConfigError(
                "give template or prompt_column, not both: a template builds the whole prompt, and {{ question }} in "
                "it inserts a column."
            )
        if self.new and self.retry_errors:
            raise ConfigError("give new or retry_errors, not both: a new job has no rows with errors.")
        if self.limit is not None and not 1 <= self.limit <= sys.maxsize:
            raise ConfigError(f"limit is {self.limit}, must be 1 to {sys.maxsize}.")
        if not all(name.strip() for name in self.input) or not self.input:
            raise ConfigError(f"input is {list(self.input)}; each input must name a file, a folder or a pattern.")
