"""Save and load adapters: folders in PEFT's layout, with a card that names the base.

    adapter_model.safetensors   the factors (under PEFT's names), `mask_embedding` and the sampler head;
                                int8 tensors have scales, in tensors called `…_scale`
    adapter_config.json         the keys of PEFT, and `gated: true`
    mars.json                   the card: how the adapter was trained, and the digest of the base

In:    an adapter and its card; or a folder and its base.
Out:   a complete folder or none; or the adapter, which is not yet attached to a network.
Never: loads an adapter for a base with other tokens than the one it was trained on.
"""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mars_ray.adapter.card import CONFIG_FILE, AdapterCard, check_vocabulary, read_adapter_card
from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.adapter.stored_tensors import adapter_of, stored_tensors
from mars_ray.errors import AdapterError, OutputError
from mars_ray.model.card import CARD_FILE, write_card
from mars_ray.model.checkpoint import save_folder
from mars_ray.model.digest import weights_digest

log = logging.getLogger(__name__)

WEIGHTS_FILE = "adapter_model.safetensors"


def save_adapter(
    adapter: GatedLoRA, card: AdapterCard, folder: Path, *, dtype: torch.dtype = torch.bfloat16, replace: bool = False
) -> None:
    """Write `adapter` to `folder`, which must be absent or empty; with `replace`, it may hold an adapter and nothing
    else, which goes once the new one is complete."""
    shape = adapter.shape
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": card.base_model,
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in shape.linears}),
        "gated": True,
    }

    def write(partial: Path) -> None:
        save_file(stored_tensors(adapter, dtype), partial / WEIGHTS_FILE)
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_card(card, partial)
        (partial / WEIGHTS_FILE).chmod((partial / CONFIG_FILE).stat().st_mode)

    if replace and folder.is_dir():
        _replace(folder, write)
    else:
        save_folder(folder, write)


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a new adapter next to the one in `folder`, and then put it there."""
    folder = folder.resolve()
    files = {path.name for path in folder.iterdir()}
    if others := sorted(files - {WEIGHTS_FILE, CONFIG_FILE, CARD_FILE}):
        raise OutputError(f"{folder} has files other than an adapter, such as {others[0]}. Give another folder.")
    new, old = (folder.with_name(f".{folder.name}.{state}") for state in ("new", "old"))
    try:
        for path in (new, old):  # left over from a process that was killed
            shutil.rmtree(path, ignore_errors=True)
        save_folder(new, write)
        folder.replace(old)
        new.replace(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"Cannot replace the adapter in {folder}: {error}.") from error


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter and its card."""

    lora: GatedLoRA
    card: AdapterCard


class AdapterLoader:
    """Loads adapters of the model in `base`. The weights of the model are read once, for their digest."""

    def __init__(self, base: Path) -> None:
        self._base = base

    @cached_property
    def _digest(self) -> str:
        return weights_digest(self._base)

    def load(self, folder: Path) -> Adapter:
        """Load the adapter in `folder` in float32, in eval mode and without gradients.

        Logs a warning if the base has other weights than the one it was trained on. Raises `AdapterError` if the
        adapter is incomplete or was trained with another vocabulary.
        """
        card = read_adapter_card(folder)
        check_vocabulary(card, folder, self._base)
        if card.base_digest != self._digest:
            log.warning(
                "the adapter in %s was trained on %s with other weights (digest %s; %s has %s), so its guesses may be "
                "right less often than its card says; answers in exact mode stay the same",
                folder,
                card.base_model,
                card.base_digest,
                self._base,
                self._digest,
            )
        return Adapter(_load(folder).requires_grad_(False).eval(), card)


def load_adapter(folder: Path, base: Path) -> Adapter:
    """Load the adapter in `folder` for the model in `base`. Raises the errors of `AdapterLoader`."""
    return AdapterLoader(base).load(folder)


def start_from(adapter: GatedLoRA, folder: Path) -> None:
    """Copy the weights of the adapter in `folder` into `adapter`; the two may have different bases.

    An adapter with fewer masks takes the first ones. Raises `AdapterError` if the adapter in `folder` is incomplete,
    has too few masks, or differs from `adapter` in another size.
    """
    source = _load(folder)
    masks = adapter.shape.masks
    if source.shape.masks < masks:
        raise AdapterError(
            f"Training cannot begin with the adapter in {folder}: it has {source.shape.masks} masks, and a block of "
            f"{masks + 1} needs {masks}."
        )
    for name in ("rank", "alpha", "linears"):
        size = getattr(source.shape, name)
        needed = getattr(adapter.shape, name)
        if size != needed:
            difference = "other linear layers" if name == "linears" else f"{name} {size}, here it is {needed}"
            raise AdapterError(f"Training cannot begin with the adapter in {folder}: it has {difference}.")
    hidden = source.mask_embedding_KH.shape[1]
    if hidden != adapter.mask_embedding_KH.shape[1]:
        raise AdapterError(
            f"Training cannot begin with the adapter in {folder}: it has hidden size {hidden}, here it is "
            f"{adapter.mask_embedding_KH.shape[1]}."
        )
    with torch.no_grad():
        adapter.mask_embedding_KH.copy_(source.mask_embedding_KH[:masks])
    adapter.sampler.load_state_dict(source.sampler.state_dict())
    for name, pair in source.factors.items():
        adapter.factors[name].load_state_dict(pair.state_dict())


def _load(folder: Path) -> GatedLoRA:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if config["peft_type"] != "LORA" or config["gated"] is not True:
            raise AdapterError(f"{CONFIG_FILE} does not contain gated: true, so it is not a gated LoRA.")
        return adapter_of(load_file(folder / WEIGHTS_FILE), config["r"], config["lora_alpha"])
    except (AdapterError, OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error) if isinstance(error, AdapterError) else f"{error!r}."
        raise AdapterError(f"{folder} is not a complete adapter: {reason} Download or train it again.") from error
