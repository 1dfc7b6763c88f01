"""Settings of a training run: the YAML of `mars-ray train --config`, checked before the run starts.

An unknown key or a value out of range raises a `ConfigError` that names the key.
"""

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from mars_ray.data.dropped_records import MAX_DROPPED
from mars_ray.errors import ConfigError, problems_of
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.model.resolve import Name
from mars_ray.storage.location import PathOrUrl


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataSection(_Section):
    """Training data and held-out data."""

    train: PathOrUrl
    """JSONL (plain, gz or zst) or parquet, as a path or URL. Each record has `messages`, or `prompt` and `response`."""
    heldout: PathOrUrl
    """Data of the same form; during training, the model is measured on a few packed rows of it."""
    length: int = Field(512, ge=8)
    """Tokens per packed row, and so the maximum length of an example; at most the context of the model."""
    overlong: Literal["drop", "truncate"] = "drop"
    """Treatment of examples that are longer."""
    max_dropped: float = Field(MAX_DROPPED, ge=0, le=1)
    """Maximum share of the records of a file that may be dropped, because they are unusable or too long. The run
    reports what it drops. At 0, the first such record is an error."""


class AdapterSection(_Section):
    """A gated LoRA that is trained instead of the model; the weights of the model do not change."""

    rank: int = Field(64, ge=1)
    alpha: float | None = Field(None, gt=0)
    """Low-rank products are scaled by alpha / rank. Default: twice the rank."""
    target_modules: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of the linear layers to adapt, such as q_proj. Default: all of them."""
    init: Name | None = None
    """Adapter to start from: a folder, its URL or a name on a hub. It must have the same sizes, and a block as long or
    longer. It may have been trained for another model, such as the one this model was fine-tuned from."""


class ObjectiveSection(_Section):
    """The training objective. The defaults were the best settings with every seed in `pipelines/reproduction`."""

    kind: Literal["ar", "mars"]
    block: int = Field(16, ge=2, le=64)
    """Tokens that a forward gives at most when decoding."""
    growth: bool = True
    """Start with short blocks that grow to `block` by the end of the run."""
    phase: Literal["absolute", "random"] = "random"
    """Blocks start at multiples of their masks, as in the paper, or are shifted at random for each example."""
    ar_weight: float = Field(1.0, ge=0)
    """Weight of the clean stream's loss relative to the noisy stream's loss."""
    decay: float = Field(1.0, gt=0, le=1)
    """Weight of a mask relative to the mask before it in its block."""
    distill: float = Field(0.0, ge=0, le=1)
    """Weight of the clean stream's prediction in the target of a mask; the remaining weight goes to the token in the
    data. With an adapter, the default is 1, so that masks learn to predict the model itself, whatever the text is."""
    total_variation: float = Field(0.0, ge=0, le=1)
    """Share of the loss at a mask that is the total variation between its distribution and the clean stream's; the
    rest is cross-entropy. A draft is accepted the more often, the smaller the total variation is."""
    adapter: AdapterSection | None = None
    """Train an adapter that acts at masks, and leave the model unchanged."""

    @property
    def masks(self) -> int:
        """Masks in a whole block. The model itself gives the first token of a block, so an adapter needs one less; a
        model that is trained as a whole has as many as in the paper."""
        return self.block - 1 if self.adapter else self.block

    @model_validator(mode="before")
    @classmethod
    def _distil_into_adapters(cls, fields: Any) -> Any:
        return {"distill": 1.0} | fields if isinstance(fields, dict) and fields.get("adapter") is not None else fields

    @model_validator(mode="after")
    def _no_setting_is_idle(self) -> "ObjectiveSection":
        chosen = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if self.kind == "ar" and (idle := [name for name in chosen if name != "kind"]):
            raise ValueError(f"{', '.join(idle)}: only kind mars has masks, but kind is ar")
        if self.adapter and "ar_weight" in chosen:
            raise ValueError("ar_weight trains the model itself, which stays as it is with an adapter")
        return self


class OptimizerSection(_Section):
    """AdamW with a linear warm-up and a cosine decay to zero."""

    learning_rate: float = Field(gt=0)
    epochs: float = Field(gt=0)
    batch_rows: int = Field(16, ge=1)
    """Packed rows per optimizer step, summed over all workers."""
    micro_rows: int = Field(16, ge=1)
    """Packed rows per forward on one worker; gradients are accumulated over the forwards of a step."""
    warmup: float = Field(0.03, ge=0, lt=1)
    """Share of the steps during which the learning rate rises."""
    weight_decay: float = Field(0.01, ge=0)
    clip_norm: float = Field(1.0, gt=0)


class ComputeSection(_Section):
    """The workers of a run and their resources."""

    workers: int = Field(1, ge=1)
    cpus_per_worker: int = Field(1, ge=1)
    """Logical CPUs and torch threads of each worker."""
    gpu: bool = False
    """Whether each worker has a GPU."""
    precision: DtypeOrAuto = "auto"
    """bfloat16 means mixed precision: weights and optimizer stay in float32. auto chooses bfloat16 for a large 16-bit
    checkpoint if the machine computes fast in bfloat16."""
    sharding: Literal["ddp", "fsdp"] = "ddp"
    """ddp keeps all weights on every worker. fsdp divides weights, gradients and optimizer among the workers, and
    gathers the weights of a layer while it computes. With an adapter, it divides the frozen model."""
    activation_checkpointing: bool = False
    """Keep only the inputs of layers for the backward pass, which computes each layer again: less memory, slower."""
    worker_restarts: int = Field(3, ge=0)
    """Number of times that dead workers are replaced before the run fails."""


class TrainConfig(_Section):
    """The settings of one training run. Raises `ConfigError`, which names each wrong key or value."""

    model: Name
    """The model to start from: `bundled`, `smollm2`, a folder, a .gguf file, a URL of a folder or .gguf file, or a name
    on a hub."""
    output: PathOrUrl
    """Run folder, or its URL: packed data, checkpoints, metrics, and the finished model in `model/`."""
    data: DataSection
    objective: ObjectiveSection
    optimizer: OptimizerSection
    compute: ComputeSection = ComputeSection()
    checkpoint_every: int = Field(200, ge=1)
    """Steps between two saved states."""
    checkpoints_kept: int = Field(2, ge=1)
    measure_every: int = Field(20, ge=1)
    """Steps between two measurements of the held-out rows; another one follows the last step."""
    measure_rows: int = Field(16, ge=1)
    patience: int | None = Field(None, ge=1)
    """With an adapter: number of measurements in a row, none of which finds more tokens per forward than before, after
    which the run ends early. With null, all steps are done."""
    seed: int = Field(0, ge=0, lt=2**40)

    @model_validator(mode="after")
    def _rows_divide_evenly(self) -> "TrainConfig":
        workers = self.compute.workers
        batch_rows = self.optimizer.batch_rows
        if batch_rows % workers:
            raise ValueError(f"optimizer.batch_rows is {batch_rows}, which {workers} workers cannot share evenly")
        if self.patience and not self.objective.adapter:
            raise ValueError("patience is for adapters; a model that is trained as a whole keeps its last state")
        if self.compute.sharding == "fsdp" and workers == 1:
            raise ValueError(
                "compute.sharding is fsdp, which divides a model among workers, but compute.workers is 1; set 2 or "
                "more, or sharding: ddp"
            )
        if self.compute.sharding == "fsdp" and self.objective.adapter and self.compute.activation_checkpointing:
            raise ValueError("compute.activation_checkpointing with an adapter needs compute.sharding: ddp")
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _with_our_error(cls, settings: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(settings)
        except ValidationError as error:
            raise ConfigError(problems_of(error)) from None


def read_config(path: Path) -> TrainConfig:
    """Read the settings of a run from a YAML file. Raises `ConfigError`, which names each wrong key or value."""
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no config {path}. Give the YAML of a run, as in pipelines/.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds no settings. See pipelines/finetune.yaml for an example.")
    return parse_config(fields, str(path))


def parse_config(fields: dict[str, Any], origin: str) -> TrainConfig:
    """Check settings; messages name `origin`. Raises `ConfigError`, which names each wrong key or value."""
    try:
        return TrainConfig.model_validate(fields)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
