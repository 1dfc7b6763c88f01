"""The card of a checkpoint, `mars.json`: how it was trained, and how fast and accurate it was at each threshold.

Nothing is guessed: an unknown or missing field is an error. A half-written card is never seen.
"""

import platform
import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mars_ray.errors import ModelError, OutputError

CARD_FILE = "mars.json"

Count = Annotated[int, Field(ge=0)]


class _Frozen(BaseModel):
    # JSON has no NaN: a number that is not finite is refused here rather than written as null.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FamilyPoint(_Frozen):
    """One task family at one threshold."""

    examples: Count
    tokens_per_forward: float
    accuracy: float


class CalibrationPoint(_Frozen):
    """What one threshold gave on all examples, decoded greedily. Each spread, `*_std`, is the standard deviation
    over the samples, null for a single one."""

    threshold: float
    tokens_per_forward: float
    """All tokens divided by all forwards."""
    tokens_per_forward_std: float | None
    agreement: float
    """Share of the tokens that autoregressive decoding chooses too, given what stands before them."""
    agreement_std: float | None
    accuracy: float | None
    """Share of right answers by the verifiers of the task families, the mean over them; null for data without."""
    accuracy_std: float | None
    examples: Count
    """Examples in all samples together; so are the other counts."""
    tokens: Count
    seeds: Annotated[int, Field(ge=1)]
    """Number of samples: held-out examples by so many seeds, or so many parts of a file."""
    data: str
    by_family: dict[str, FamilyPoint]
    """The results of each task family; empty for other data."""


class Card(_Frozen):
    """What `mars.json` says. For a checkpoint trained with method "ar", `block` is null and `objective` is empty."""

    method: Literal["ar", "mars"]
    block: Annotated[int, Field(ge=1)] | None
    """Largest number of tokens one forward was trained to predict, the autoregressive one included."""
    objective: dict[str, bool | float | str]
    """The other settings of its training objective, as the configuration names them."""
    mask_token: str
    mask_token_id: Count
    data: str
    examples: Count
    tokens: Count
    steps: Count
    seed: int
    versions: dict[str, str]
    losses: dict[str, float]
    base_model: str | None = None
    """The model that training began with, one on a hub as `organisation/name@commit`; null where that is not known."""
    calibration: tuple[CalibrationPoint, ...] = ()

    @model_validator(mode="after")
    def _mars_has_a_block(self) -> Self:
        if self.method == "mars" and self.block is None:
            raise ValueError('method "mars" needs a block')
        return self


def read_card(folder: Path) -> Card | None:
    """Return the card in `folder`, None when there is no such file; an invalid one is a `ModelError`."""
    path = folder / CARD_FILE
    if not path.is_file():
        return None
    try:
        return Card.model_validate_json(path.read_bytes())
    except ValidationError as error:
        reasons = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']}" for problem in error.errors()[:3]
        )
        raise ModelError(f"{path} is not a valid card: {reasons}. Restore the file or remove it.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error


def write_card(card: BaseModel, folder: Path) -> None:
    """Write `mars.json`, of a model or an adapter, into an existing folder; readers see the old card or the new one."""
    partial = folder / f".{CARD_FILE}.{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / CARD_FILE)
    except OSError as error:
        raise OutputError(f"Cannot write {folder / CARD_FILE}: {error}.") from error
    finally:
        partial.unlink(missing_ok=True)


def library_versions() -> dict[str, str]:
    """Return the versions of what decides the numbers: torch, transformers, mars-ray and python."""
    return {name: _installed(name) for name in ("torch", "transformers", "mars-ray")} | {
        "python": platform.python_version()
    }


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a source tree on the path, never installed
        return "not installed"
