"""What a training run is: the YAML of `mars-ray train --config`, checked when it is read.

Every key is known, every value in range, or `ConfigError` says which is not; nothing has started by then.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError, model_validator

from mars_ray.errors import ConfigError
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.storage.location import AnyPath, locate


def _located(given: object) -> AnyPath:
    if not isinstance(given, str | AnyPath):
        raise ValueError("must be a path or URL")
    return locate(given)


Place = Annotated[AnyPath, PlainValidator(_located), PlainSerializer(str)]
"""A file or folder, as a path or URL."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSection(_Section):
    """The data to learn from."""

    train: Place
    """JSONL (plain, gz, zst) or parquet, as a path or URL, with `messages`, or `prompt` and `response`."""
    heldout: Place
    """The same form; a few rows of it are measured while training runs."""
    length: int = Field(512, ge=8)
    """Tokens per packed row; no example is longer."""
    overlong: Literal["drop", "truncate"] = "drop"
    bad_records: Literal["error", "drop"] = "error"


class AdapterSection(_Section):
    """A gated LoRA that learns in place of the model, which stays as it is."""

    rank: int = Field(64, ge=1)
    alpha: float | None = Field(None, gt=0)
    """Its products are scaled by alpha / rank; twice the rank by default."""
    target_modules: tuple[str, ...] | None = None
    """Names of the linear layers it stands beside, such as q_proj; all of them by default."""
    init: str | None = None
    """An adapter to begin with, of the same sizes: a folder, its URL or a name on a hub; it may be that of another
    model, such as the one this model was fine-tuned from."""


class ObjectiveSection(_Section):
    """The training objective. Its defaults are what won in every seed of `pipelines/reproduction`."""

    kind: Literal["ar", "mars"]
    block: int = Field(16, ge=2, le=64)
    """Masks per block."""
    growth: bool = True
    """Begin with short blocks, which grow to `block` by the end of the run."""
    phase: Literal["absolute", "random"] = "random"
    """Blocks start at multiples of `block` (as the authors) or are shifted at random per example."""
    ar_weight: float = Field(1.0, ge=0)
    """What the loss of the clean stream counts against that of the noisy one."""
    decay: float = Field(1.0, gt=0, le=1)
    """What a mask counts against the one before it in its block."""
    distill: float = Field(0.0, ge=0, le=1)
    """Share of a mask's target that is what the clean stream predicts; the rest is the token of the data. With an
    adapter it is 1 by default: the model itself says what is to be looked ahead to, whatever the text."""
    adapter: AdapterSection | None = None
    """Train an adapter at the masks and leave the model as it is."""

    @model_validator(mode="before")
    @classmethod
    def _the_base_teaches_its_adapter(cls, fields: Any) -> Any:
        return {"distill": 1.0} | fields if isinstance(fields, dict) and fields.get("adapter") is not None else fields

    @model_validator(mode="after")
    def _each_has_an_effect(self) -> "ObjectiveSection":
        chosen = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if self.kind == "ar" and (idle := [name for name in chosen if name != "kind"]):
            raise ValueError(f"{', '.join(idle)}: only kind mars has masks; kind is ar")
        if self.adapter and "ar_weight" in chosen:
            raise ValueError("ar_weight trains the model itself, which stays as it is with an adapter")
        return self


class OptimizerSection(_Section):
    """AdamW under a linear warm-up and a cosine to zero."""

    learning_rate: float = Field(gt=0)
    epochs: float = Field(gt=0)
    batch_rows: int = Field(16, ge=1)
    """Packed rows per optimizer step, over all workers."""
    micro_rows: int = Field(16, ge=1)
    """Packed rows per forward on one worker; the gradients of a step are accumulated."""
    warmup: float = Field(0.03, ge=0, lt=1)
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = Field(0.01, ge=0)
    clip_norm: float = Field(1.0, gt=0)


class ComputeSection(_Section):
    """The workers of a run, and what each of them has."""

    workers: int = Field(1, ge=1)
    cpus_per_worker: int = Field(1, ge=1)
    """Logical CPUs and torch threads of each worker."""
    gpu: bool = False
    """Whether each worker has a GPU."""
    precision: DtypeOrAuto = "auto"
    """bfloat16 is mixed precision: weights and optimizer stay float32. auto takes it for a large checkpoint of 16 bits
    where the machine is fast at it."""
    sharding: Literal["ddp", "fsdp"] = "ddp"
    worker_restarts: int = Field(3, ge=0)
    """How often dead workers are replaced before the run gives up."""


class TrainConfig(_Section):
    """The settings of one training run."""

    model: str
    """The model to start from: `bundled`, `smollm2`, a folder, a .gguf file, a URL of either or a name on a hub."""
    output: Place
    """Run folder, or its URL: packed data, checkpoints, metrics, and the finished model in `model/`."""
    data: DataSection
    objective: ObjectiveSection
    optimizer: OptimizerSection
    compute: ComputeSection = ComputeSection()
    checkpoint_every: int = Field(200, ge=1)
    """Steps between two saved states."""
    checkpoints_kept: int = Field(2, ge=1)
    measure_every: int = Field(20, ge=1)
    """Steps between two looks at the held-out rows; there is one more after the last step."""
    measure_rows: int = Field(16, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _rows_divide_evenly(self) -> "TrainConfig":
        workers, batch_rows = self.compute.workers, self.optimizer.batch_rows
        if batch_rows % workers:
            raise ValueError(f"optimizer.batch_rows is {batch_rows}, which {workers} workers cannot share evenly")
        if self.compute.sharding == "fsdp" and not self.compute.gpu:
            raise ValueError("compute.sharding is fsdp, which needs compute.gpu: true")
        if self.compute.sharding == "fsdp" and self.objective.adapter:
            raise ValueError("compute.sharding is fsdp, which an adapter has no use for: the model is not trained")
        return self


def read_config(path: Path) -> TrainConfig:
    """Read a YAML file. Raises `ConfigError` naming each wrong key or value."""
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no config {path}. Give the YAML of a run, as in pipelines/.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds no settings. See pipelines/finetune.yaml for what a run needs.")
    return parse_config(fields, str(path))


def parse_config(fields: dict[str, Any], origin: str) -> TrainConfig:
    """Check settings that came from `origin`. Raises `ConfigError` naming each wrong key or value."""
    try:
        return TrainConfig.model_validate(fields)
    except ValidationError as error:
        problems = [_problem(".".join(map(str, each["loc"])), each["msg"], each["input"]) for each in error.errors()]
        raise ConfigError(f"{origin}: " + "; ".join(problems)) from None


def _problem(where: str, message: str, value: object) -> str:
    if message == "Extra inputs are not permitted":
        return f"{where} is not a setting; check its spelling"
    if message == "Field required":
        return f"{where} is missing"
    message = message.removeprefix("Value error, ")
    return f"{where} = {value!r}: {message}" if where else message
