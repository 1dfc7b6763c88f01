"""Calibrate a model or an adapter: measure it at each threshold, and write the results to its card.

Only the card changes, and it is replaced atomically.
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import torch

from mars_ray.adapter.card import AdapterCard, is_adapter, read_adapter_card, resolve_adapter
from mars_ray.adapter.folder import load_adapter
from mars_ray.engine.checked_fields import Numbers, check_fields
from mars_ray.engine.options import AtLeastOne
from mars_ray.engine.request import SamplingParams
from mars_ray.engine.stats.profile import GRID
from mars_ray.errors import InterruptedRunError, ModelError, OutputError, check_kind
from mars_ray.evaluation.calibration.curve import calibration_curve
from mars_ray.evaluation.calibration.prompts import CalibrationPrompt, family_prompts, file_prompts
from mars_ray.model.card import CARD_FILE, CalibrationPoint, Card, read_card, write_card
from mars_ray.model.checkpoint import load_model
from mars_ray.model.folder import check_folder
from mars_ray.model.resolve import resolve_model
from mars_ray.model.sources.hub import hub_name_of
from mars_ray.model.sources.node_cache import is_fetched
from mars_ray.storage.location import AnyPath, PathOrUrl

THRESHOLDS = tuple(threshold for threshold in GRID if threshold >= 0.5)
"""Default thresholds: the grid of the live profile from 0.5 upwards."""

EXAMPLES_PER_FAMILY = 100
"""Default number of examples per family in each sample."""

FAMILIES_DATA = "built-in task families, held out"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """Options of a calibration. Raises `ConfigError` for an option of a wrong type or out of range."""

    data: PathOrUrl | None = None
    """File of prompts, for which accuracy is not measured; None uses the built-in task families."""
    examples: AtLeastOne | None = None
    """Examples in each sample. None means `EXAMPLES_PER_FAMILY` per family, or all of the file."""
    seeds: AtLeastOne = 3
    """Number of samples over which spreads are computed: held-out examples with seeds 0, 1, …, or parts of the file."""
    max_tokens: AtLeastOne = 256
    thresholds: Numbers = THRESHOLDS

    def __post_init__(self) -> None:
        check_fields(self)


def calibrate(
    model: str | AnyPath, options: CalibrateOptions, adapter: str | Path | None = None
) -> tuple[CalibrationPoint, ...]:
    """Measure every threshold, and replace the calibration in the card of `adapter`, or of the model if there is no
    adapter.

    `model` and `adapter` are folders, or other names as in `GenerateOptions`. Raises an `InputError` if their card
    cannot be written to. Ctrl-C raises `InterruptedRunError` and leaves the card unchanged.
    """
    check_kind("options", options, CalibrateOptions)
    folder = resolve_model(model)
    adapter_folder = resolve_adapter(adapter)
    calibrated = adapter_folder or folder
    try:
        sampling = SamplingParams(max_tokens=options.max_tokens)
        card = _card(calibrated)
        loaded = load_adapter(adapter_folder, folder) if adapter_folder else None
        prompts = _prompts(options)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        checkpoint = load_model(
            check_folder(folder, device=device), device=device
        )  # loads in the dtype that serving uses
        data = options.data.name if options.data else FAMILIES_DATA
        curve = calibration_curve(checkpoint, prompts, options.thresholds, sampling, data, loaded)
        write_card(card.model_copy(update={"calibration": curve}), calibrated)
    except KeyboardInterrupt:
        raise InterruptedRunError(f"Stopped; {calibrated / CARD_FILE} is unchanged.") from None
    return curve


def _card(folder: Path) -> Card | AdapterCard:
    """Return the card of a folder. Check first that it can be written to, because the measurement takes a long time."""
    if name := hub_name_of(folder.absolute()):
        raise ModelError(f"{name} is in the cache of the hub, which must stay unchanged. Copy {folder} first.")
    if is_fetched(folder):
        raise ModelError(f"{folder} is a fetched copy. Calibrate the original folder.")
    card = read_adapter_card(folder) if is_adapter(folder) else read_card(folder)
    if card is None:
        raise ModelError(f"{folder} has no {CARD_FILE} to write to; `mars-ray train` makes models that have one.")
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"Cannot write into {folder}: {error.strerror}. Copy it to a folder of your own.") from None
    return card


def _prompts(options: CalibrateOptions) -> list[CalibrationPrompt]:
    if options.data is not None:
        return file_prompts(options.data, options.examples, options.seeds)
    return family_prompts(options.examples or EXAMPLES_PER_FAMILY, range(options.seeds))
