"""Results of an evaluation, as stored in `results.json`. Unknown and missing fields are errors."""

from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from mars_ray.errors import DataError, problems_of
from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import write_file

RESULTS_FILE = "results.json"
T = TypeVar("T", bound=BaseModel)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EvaluationPlan(_Frozen):
    """Inputs and settings of an evaluation, which must be the same when it is resumed."""

    version: Literal[1] = 1
    model: str
    model_digest: str
    """Digest of weights, config, tokenizer and chat template."""
    adapter_digest: str | None
    block: int
    """Tokens proposed per forward."""
    dtype: str
    quantize: str | None
    """Format that the weights are rounded to: "int8", "int4", or None."""
    dtype_reason: str
    """Reason for the choice of the dtype."""
    device: str
    """Device type of the workers."""
    tasks: tuple[str, ...]
    max_tokens: tuple[int, ...]
    """Maximum number of tokens per answer, for each task."""
    seeds: int
    questions: int
    """Number of questions over all tasks and seeds."""
    questions_digest: str
    """Digest of all prompts and references."""
    settings: tuple[str, ...]
    temperature: float


class PairedComparison(_Frozen):
    """Comparison of a setting with autoregressive decoding on the same examples."""

    difference: float
    """Difference in accuracy, negative if the setting is worse."""
    low: float
    """Lower end of the 95 % bootstrap interval over examples."""
    high: float
    """Upper end of the 95 % bootstrap interval over examples."""
    better: int
    """Number of examples that only the setting answers correctly."""
    worse: int
    """Number of examples that only autoregressive decoding answers correctly."""
    p_value: float
    """Two-sided p-value: McNemar's exact test for one task, and a variant that weights tasks equally for several."""


class Metrics(_Frozen):
    """Metrics of one setting, on one task or on all tasks.

    Each `*_std` is the standard deviation over seeds, or null for a single seed.
    """

    examples: int
    unanswered: int
    """Number of questions without an answer, which count as wrong."""
    right: int
    accuracy: float
    """Share of correct answers; for several tasks, the mean of their accuracies."""
    accuracy_std: float | None
    accuracy_low: float
    """Lower end of the 95 % bootstrap interval over examples."""
    accuracy_high: float
    """Upper end of the 95 % bootstrap interval over examples."""
    tokens: int
    forwards: int
    tokens_per_forward: float | None
    """Tokens divided by forwards; null if nothing was answered."""
    tokens_per_forward_std: float | None
    agreement: float | None
    """Share of the tokens that autoregressive decoding would also choose after the same prefix; null above temperature
    0."""
    agreement_std: float | None
    same_answers: float
    """Share of the examples whose answers have the same tokens as under autoregressive decoding."""
    against_ar: PairedComparison | None
    """Comparison with autoregressive decoding; null for `ar` itself."""


class SettingSpeed(_Frozen):
    """Measured speed of one setting. All settings answer the same prompts."""

    tokens_per_s: float
    """Tokens per second, as the mean over the rounds."""
    tokens_per_s_std: float
    rounds: tuple[float, ...]


class SpeedMeasurement(_Frozen):
    """Measured speeds of all settings, and the conditions of the measurement."""

    prompts: int
    machine: dict[str, str | int | float | bool | None]
    """Description of the machine, and the commit of this code."""
    rows: int
    """Maximum number of sequences that the engine decodes together."""
    device: str
    threads: int
    settings: dict[str, SettingSpeed]


class Results(_Frozen):
    """All results of an evaluation."""

    version: Literal[1] = 1
    plan: EvaluationPlan
    overall: dict[str, Metrics]
    """Metrics of each setting over all tasks."""
    tasks: dict[str, dict[str, Metrics]]
    """Metrics of each setting on each task, keyed by task and then by setting."""
    stops: dict[str, tuple[int, ...]]
    """For each setting, the numbers of forwards that gave 1, 2, … tokens. The last forward of each answer is left out,
    because the end of the answer cuts it short."""
    speed: SpeedMeasurement


def write_model(path: AnyPath, model: BaseModel) -> None:
    """Write a pydantic model as JSON. Raises `RunError` if it cannot be written."""
    write_file(path, [model.model_dump_json(indent=2).encode() + b"\n"])


def read_model(path: AnyPath, kind: type[T]) -> T:
    """Read a pydantic model. Raises `DataError` for an invalid file."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        reason = error.strerror
    except ValidationError as error:
        reason = problems_of(error)
    raise DataError(f"{path} is not a file of an evaluation: {reason}. Give another output folder.")
