"""Settings of the plug-in: the key "mars" of vLLM's `--additional-config`, completed from the checkpoint's card."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mars_ray.engine.mode import DEFAULT_THRESHOLD
from mars_ray.engine.service_class import STANDARD
from mars_ray.errors import ConfigError, ModelError
from mars_ray.model.card import CARD_FILE, Card, read_card
from mars_ray.vllm.step_layout import draft_positions

KEY = "mars"
"""Key of the settings in `--additional-config`."""


class VllmSettings(BaseModel):
    """Settings of MARS in one vLLM engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    threshold: Annotated[float, Field(ge=0, le=1)] = DEFAULT_THRESHOLD
    """Threshold of requests that set none; `set_mars_threshold` changes it while the engine runs."""
    classes: Annotated[tuple[str, ...], Field(min_length=1)] = (STANDARD,)
    """Service classes, each with a threshold of its own while the engine runs. Requests of other classes belong to the
    first."""
    mode: Literal["threshold", "exact"] = "threshold"
    """With "exact", every token at a mask is verified, whatever threshold a request sets."""
    block: Annotated[int, Field(ge=2, le=64)]
    """Most tokens that a step may yield: the next token and block - 1 tokens at masks. The default is the block that
    the model was trained with."""
    mask_id: Annotated[int, Field(ge=0)]
    """Token that is fed at positions to predict ahead; the card names it."""

    @property
    def masks(self) -> int:
        """Masks per step of a request with the full block."""
        return self.block - 1

    @property
    def draft_positions(self) -> int:
        """Draft positions that the scheduler gives a request per step, besides the position of its newest token."""
        return draft_positions(self.block)

    @classmethod
    def complete(cls, given: Any, folder: Path, vocab_size: int) -> Self:
        """Return the settings for the checkpoint in `folder`, whose card has the block and the mask token.

        Raises `ModelError` without a usable card, and `ConfigError` for wrong settings.
        """
        card = read_card(folder)
        if card is None:
            raise ModelError(
                f"{folder} has no card {CARD_FILE}, which names the mask token. Name the folder of a checkpoint that "
                "mars-ray trained."
            )
        block = _block(card, folder)
        if card.mask_token_id >= vocab_size:
            raise ModelError(
                f"{folder / CARD_FILE} names mask token {card.mask_token_id}, and the network has {vocab_size} tokens. "
                "Restore the card or config.json."
            )
        if not isinstance(given, dict):
            raise ConfigError(
                f"additional_config {KEY} is {given!r}; it must be an object such as {{'threshold': 0.95}}."
            )
        settings = cls.read({"block": block, **given, "mask_id": card.mask_token_id})
        if settings.block > block:
            raise ConfigError(f"block is {settings.block}; the model was trained with {block}, so choose 2 to {block}.")
        return settings

    @classmethod
    def read(cls, given: Any) -> Self:
        """Return completed settings. Raises `ConfigError` for wrong ones."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(map(str, (KEY, *problem["loc"])))
            raise ConfigError(f"additional_config {name} is {problem['input']!r}: {problem['msg']}.") from error


def _block(card: Card, folder: Path) -> int:
    if card.block is None or card.block < 2:
        raise ModelError(
            f"{folder / CARD_FILE} has method {card.method} and block {card.block}: the model predicts one token at a "
            "time. Serve it without MARS, or train it with method mars."
        )
    return card.block
