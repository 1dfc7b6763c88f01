"""Settings of the plug-in: the key "mars" of vLLM's `--additional-config`, completed from the checkpoint's card."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mars_ray.adapter.card import check_vocabulary, read_adapter_card, resolve_adapter
from mars_ray.control.control_settings import ControlPlan, ControlSettings
from mars_ray.engine.mode import DEFAULT_THRESHOLD
from mars_ray.engine.service_class import STANDARD, ServiceClass
from mars_ray.errors import ConfigError, ModelError, problems_of
from mars_ray.model.card import CARD_FILE, read_card
from mars_ray.vllm.step_rule import draft_positions

KEY = "mars"
"""Key of the settings in `--additional-config`."""


class ControllerSettings(BaseModel):
    """The controller that the agent of `vllm serve` reports to."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    """Name of the controller. Engines with the same name, model and settings are controlled together."""
    address: str = "auto"
    """Address of the Ray cluster on which the controller runs; `auto` is the cluster of this node."""
    floor: Annotated[float, Field(ge=0, le=1)] | None = None
    """Lowest threshold that the controller may set; None leaves the limit to the controller."""
    settings: ControlSettings = ControlSettings()
    """Settings of the controller, such as its policy."""

    @field_validator("settings")
    @classmethod
    def _policy_follows_load(cls, settings: ControlSettings) -> ControlSettings:
        settings.check_for_endpoint()
        return settings


class VllmSettings(BaseModel):
    """Settings of MARS in one vLLM engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    threshold: Annotated[float, Field(ge=0, le=1)] = DEFAULT_THRESHOLD
    """Threshold of requests that set none; `set_mars_threshold` changes it while the engine runs."""
    classes: Annotated[tuple[str, ...], Field(min_length=1)] = (STANDARD,)
    """Service classes, each with a threshold of its own while the engine runs. Requests of other classes belong to the
    first."""
    mode: Literal["threshold", "exact"] = "threshold"
    """With "exact", only the network's own choices are kept, whatever threshold a request sets."""
    block: Annotated[int, Field(ge=2, le=64)]
    """Most tokens that a step may yield: the next token and block - 1 tokens at masks. The default is the block that
    the model was trained with."""
    adapter: str | None = None
    """Folder of a lossless adapter, its URL or its name; None for a checkpoint whose own weights were trained."""
    any_version: bool = False
    """Start with a version of vLLM that the plug-in was not tried with."""
    controller: ControllerSettings | None = None
    """Controller that the agent of `vllm serve` reports to; None without the agent."""
    mask_id: Annotated[int, Field(ge=0)]
    """Token that is fed at positions to predict ahead; the card names it. With an adapter, the first id after the
    vocabulary, because the network has no mask token."""

    @model_validator(mode="after")
    def _floor_below_the_threshold(self) -> Self:
        if self.controller is not None:
            ControlPlan(ceiling=self.threshold, classes=(ServiceClass(floor=self.controller.floor),))
        return self

    @property
    def masks(self) -> int:
        """Masks per step of a request with the full block."""
        return self.block - 1

    @property
    def mask_step(self) -> int:
        """Difference of the ids of a request's neighbouring masks. An adapter has an embedding for each mask."""
        return 1 if self.adapter else 0

    @property
    def lenient(self) -> bool:
        """Whether thresholds apply to drafts, which the network judges, because an adapter knows less than it."""
        return self.adapter is not None

    @property
    def draft_positions(self) -> int:
        """Draft positions that the scheduler gives a request per step, besides the position of its newest token."""
        return draft_positions(self.block)

    @classmethod
    def complete(cls, additional: Any, folder: Path, vocab_size: int) -> Self:
        """Return the settings for the checkpoint in `folder`. The card of the checkpoint, or else that of the adapter,
        has the block, and the card of the checkpoint has the mask token.

        Raises `ModelError` without a usable card, `AdapterError` if an adapter does not fit, and `ConfigError` for
        wrong settings.
        """
        if not isinstance(additional, dict):
            raise ConfigError(
                f"additional_config {KEY} is {additional!r}; it must be an object such as {{'threshold': 0.95}}."
            )
        if additional.get("adapter") is None:
            block, mask_id = _of_checkpoint(folder, vocab_size)
            adapter = None
        else:
            adapter, block = _of_adapter(additional["adapter"], folder)
            mask_id = vocab_size
        settings = cls.read({"block": block, **additional, "adapter": adapter, "mask_id": mask_id})
        if settings.block > block:
            raise ConfigError(f"block is {settings.block}; the model was trained with {block}, so choose 2 to {block}.")
        return settings

    @classmethod
    def read(cls, additional: Any) -> Self:
        """Return completed settings. Raises `ConfigError` for wrong ones."""
        try:
            return cls.model_validate(additional)
        except ValidationError as error:
            raise ConfigError(f"additional_config {KEY}: {problems_of(error)}.") from error


def _of_checkpoint(folder: Path, vocab_size: int) -> tuple[int, int]:
    """Return the block and the mask token of a checkpoint."""
    card = read_card(folder)
    if card is None:
        raise ModelError(
            f"{folder} has no card {CARD_FILE}, which names the mask token. Name the folder of a checkpoint that "
            "mars-ray trained, or add an adapter."
        )
    if card.block is None or card.block < 2:
        raise ModelError(
            f"{folder / CARD_FILE} has method {card.method} and block {card.block}: the model predicts one token at a "
            "time. Serve it without MARS, train it with objective: {kind: mars}, or add an adapter."
        )
    if card.mask_token_id >= vocab_size:
        raise ModelError(
            f"{folder / CARD_FILE} names mask token {card.mask_token_id}, and the network has {vocab_size} tokens. "
            "Restore the card or config.json."
        )
    return card.block, card.mask_token_id


def _of_adapter(name: Any, base: Path) -> tuple[str, int]:
    """Return the folder and the block of an adapter for the model in `base`."""
    if not isinstance(name, str):
        raise ConfigError(
            f"additional_config {KEY}.adapter is {name!r}; it must be the folder or the name of an adapter."
        )
    folder = resolve_adapter(name)
    assert folder is not None
    card = read_adapter_card(folder)
    check_vocabulary(card, folder, base)
    return str(folder), card.block
