"""What an evaluation found, as it is written to `results.json`. An unknown or missing field is an error."""

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
    """What is evaluated, and how: a run that goes on must ask for the same."""

    version: Literal[1] = 1
    model: str
    model_digest: str
    """Digest of weights, config, tokenizer and chat template."""
    adapter_digest: str | None
    """The same of the adapter."""
    block: int
    """Tokens proposed per forward."""
    dtype: str
    quantize: str | None
    """Bits the weights are rounded to."""
    dtype_reason: str
    """Why it is that one: it was asked for, or what speaks for it."""
    device: str
    """The kind of device that decodes."""
    tasks: tuple[str, ...]
    max_tokens: tuple[int, ...]
    """Tokens of an answer at most, by task."""
    seeds: int
    questions: int
    """Number of questions, of all tasks and seeds."""
    questions_digest: str
    """Digest of all prompts and references."""
    settings: tuple[str, ...]
    temperature: float
    compiled: bool


class PairedComparison(_Frozen):
    """A setting against autoregressive decoding, on the same examples."""

    difference: float
    """Difference of the accuracies; negative where the setting is worse."""
    low: float
    high: float
    """Upper end of the 95 % bootstrap interval over examples; `low` is the lower one."""
    better: int
    """Examples that only the setting has right."""
    worse: int
    """Examples that only autoregressive decoding has right."""
    p_value: float
    """Two-sided p-value of this comparison: exact McNemar; of several tasks its form in which each counts alike."""


class Metrics(_Frozen):
    """One setting, on one task or on all of them. Each spread, `*_std`, is the standard deviation over seeds, null for
    a single one."""

    examples: int
    unanswered: int
    """Questions without an answer; they count as wrong."""
    right: int
    accuracy: float
    """Share of all examples; of all tasks, each counts alike."""
    accuracy_std: float | None
    accuracy_low: float
    accuracy_high: float
    """Upper end of the 95 % bootstrap interval over examples; `accuracy_low` is the lower one."""
    tokens: int
    forwards: int
    tokens_per_forward: float | None
    """All tokens over all forwards; null where nothing was answered."""
    tokens_per_forward_std: float | None
    agreement: float | None
    """Share of the tokens that autoregressive decoding chooses too, given what stands before them; null at a
    temperature above 0, where it makes no one choice."""
    agreement_std: float | None
    same_answers: float
    """Share of the examples with the very tokens of autoregressive decoding."""
    against_ar: PairedComparison | None
    """The comparison with autoregressive decoding; null for that itself."""


class SettingSpeed(_Frozen):
    """One setting by the clock, the same prompts for all, in turns."""

    tokens_per_s: float
    """Mean tokens per second over rounds."""
    tokens_per_s_std: float
    rounds: tuple[float, ...]


class SpeedMeasurement(_Frozen):
    """What the clock said, and how it was asked."""

    prompts: int
    machine: dict[str, str | int | float | bool | None]
    """The machine, with the commit of this code."""
    rows: int
    """Sequences the engine decodes together at most."""
    device: str
    threads: int
    settings: dict[str, SettingSpeed]


class Results(_Frozen):
    """An evaluation."""

    version: Literal[1] = 1
    plan: EvaluationPlan
    overall: dict[str, Metrics]
    """Metrics by setting, all tasks together."""
    tasks: dict[str, dict[str, Metrics]]
    """Metrics by task and setting."""
    stops: dict[str, tuple[int, ...]]
    """Forwards that gave 1, 2, ... tokens, by setting; those that ended an answer are left out: the end cut them."""
    speed: SpeedMeasurement


def write_model(path: AnyPath, model: BaseModel) -> None:
    """Write a record as JSON. Raises `RunError` where that is not possible."""
    write_file(path, [model.model_dump_json(indent=2).encode() + b"\n"])


def read_model(path: AnyPath, kind: type[T]) -> T:
    """Read a record. Raises `DataError` for a file that is none."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        reason = error.strerror
    except ValidationError as error:
        first = error.errors()[0]
        reason = " ".join([*map(str, first["loc"]), first["msg"]])
    raise DataError(f"{path} is not what an evaluation writes: {reason}. Give another output folder.")
