"""The results of an evaluation, as in `results.json`. Unknown and missing fields are errors."""

from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from mars_ray.errors import DataError
from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import write_file

RESULTS_FILE = "results.json"
T = TypeVar("T", bound=BaseModel)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EvaluationPlan(_Frozen):
    """The inputs and settings of an evaluation, which a resumed run must share."""

    version: Literal[1] = 1
    model: str
    model_digest: str
    """Digest of weights, config, tokenizer and chat template."""
    adapter_digest: str | None
    """Digest of the adapter."""
    block: int
    """Tokens proposed per forward."""
    dtype: str
    quantize: str | None
    """Bits that the weights are rounded to."""
    dtype_reason: str
    """The reason for the dtype."""
    device: str
    """The kind of device of the workers."""
    tasks: tuple[str, ...]
    max_tokens: tuple[int, ...]
    """Most tokens of an answer, by task."""
    seeds: int
    questions: int
    """Number of questions over all tasks and seeds."""
    questions_digest: str
    """Digest of all prompts and references."""
    settings: tuple[str, ...]
    temperature: float
    compiled: bool


class PairedComparison(_Frozen):
    """A comparison of a setting with autoregressive decoding on the same examples."""

    difference: float
    """Difference of the accuracies, negative if the setting is worse."""
    low: float
    """Lower end of the 95 % bootstrap interval over examples."""
    high: float
    """Upper end of that interval."""
    better: int
    """Examples that only the setting answers correctly."""
    worse: int
    """Examples that only autoregressive decoding answers correctly."""
    p_value: float
    """Two-sided p-value: exact McNemar for one task, and for several tasks its form with equal weights of tasks."""


class Metrics(_Frozen):
    """Metrics of one setting, on one task or on all of them.

    Each `*_std` is the standard deviation over seeds, null for a single seed.
    """

    examples: int
    unanswered: int
    """Questions without an answer, which count as wrong."""
    right: int
    accuracy: float
    """Share of right answers; over several tasks, the mean of the tasks."""
    accuracy_std: float | None
    accuracy_low: float
    """Lower end of the 95 % bootstrap interval over examples."""
    accuracy_high: float
    """Upper end of that interval."""
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
    """Share of the examples with the same tokens as autoregressive decoding."""
    against_ar: PairedComparison | None
    """The comparison with autoregressive decoding, null for `ar` itself."""


class SettingSpeed(_Frozen):
    """Measured speed of one setting, on the same prompts as all others."""

    tokens_per_s: float
    """Mean over rounds."""
    tokens_per_s_std: float
    rounds: tuple[float, ...]


class SpeedMeasurement(_Frozen):
    """Measured speeds of all settings, and the conditions of the measurement."""

    prompts: int
    machine: dict[str, str | int | float | bool | None]
    """The machine, and the commit of this code."""
    rows: int
    """Most sequences that the engine decodes together."""
    device: str
    threads: int
    settings: dict[str, SettingSpeed]


class Results(_Frozen):
    """All results of an evaluation."""

    version: Literal[1] = 1
    plan: EvaluationPlan
    overall: dict[str, Metrics]
    """Metrics by setting, over all tasks."""
    tasks: dict[str, dict[str, Metrics]]
    """Metrics by task and setting."""
    stops: dict[str, tuple[int, ...]]
    """Forwards that gave 1, 2, … tokens, by setting, without the last of each answer, which the end cuts short."""
    speed: SpeedMeasurement


def write_model(path: AnyPath, model: BaseModel) -> None:
    """Write a model as JSON. Raises `RunError` when it cannot be written."""
    write_file(path, [model.model_dump_json(indent=2).encode() + b"\n"])


def read_model(path: AnyPath, kind: type[T]) -> T:
    """Read a model. Raises `DataError` for an invalid file."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        reason = error.strerror
    except ValidationError as error:
        first = error.errors()[0]
        reason = " ".join([*map(str, first["loc"]), first["msg"]])
    raise DataError(f"{path} is no file of an evaluation: {reason}. Give another output folder.")
