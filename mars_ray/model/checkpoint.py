"""Load and save a checkpoint as a plain Hugging Face folder.

In:    a folder with a decoder, its tokenizer and perhaps a card; or a checkpoint.
Out:   a Checkpoint whose network and tokenizer share a mask token; or a folder that any Hugging Face tool can open.
Never: leaves a half-written folder, overwrites another folder, or changes the network that it saves.
"""

import json
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mars_ray.errors import ModelError, OutputError
from mars_ray.model.card import Card, write_card
from mars_ray.model.folder import ResolvedModel, check_folder
from mars_ray.model.json_object import read_json_object
from mars_ray.model.mask_token import ensure_mask_token
from mars_ray.model.network import load_network


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A decoder, its tokenizer, the id of its mask token, the card of its training, and its folder."""

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    mask_id: int
    card: Card | None
    folder: Path | None = None
    """The folder that the network was loaded from; None for a network that was made in memory."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a response: the stop ids of the generation config, and the tokenizer's end of sequence."""
        configured = self.network.generation_config.eos_token_id
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(number for number in (*ids, self.tokenizer.eos_token_id) if number is not None)


def load_checkpoint(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attention: str | None = None,
) -> Checkpoint:
    """Check `folder` and load its model with `load_model`."""
    return load_model(check_folder(folder), dtype=dtype, device=device, attention=attention)


def load_model(
    model: ResolvedModel,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    attention: str | None = None,
) -> Checkpoint:
    """Load a model in eval mode, in its resolved dtype or in `dtype`. A mask token is added if there is none."""
    card = model.card
    tokenizer = model.load_tokenizer()
    network = load_network(model, dtype or getattr(torch, model.dtype.name), attention)
    mask_id = ensure_mask_token(network, tokenizer)
    if card is not None and card.mask_token_id != mask_id:
        raise ModelError(
            f"{model.folder}: mars.json says the mask token has id {card.mask_token_id}, the tokenizer says {mask_id}. "
            "The card or the tokenizer belongs to another checkpoint."
        )
    return Checkpoint(network.to(device).eval(), tokenizer, mask_id, card, model.folder)


def save_checkpoint(checkpoint: Checkpoint, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write `checkpoint` to `folder`, which must be absent or empty; if `dtype` is given, the weights in the file are
    cast to it, but not those in memory."""
    save_folder(folder, lambda partial: _write(checkpoint, partial, dtype))


def save_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Create `folder`, which must be absent or empty, atomically with the files that `write` writes."""
    folder = folder.absolute()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputError(f"{folder} is already in use. Give a new folder or remove this one.")
        # Use the same parent folder, so that the rename stays on one file system.
        partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
        partial.mkdir(parents=True)
        try:
            write(partial)
            partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"Cannot write the checkpoint to {folder}: {error}.") from error


def _write(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None) -> None:
    network = checkpoint.network
    state = None if dtype is None else _cast(network.state_dict(), dtype)
    try:
        network.save_pretrained(folder, state_dict=state)
    except ValueError as error:  # transformers before 5.23 refuses to save some settings that it loads
        raise OutputError(f"Cannot write the checkpoint: {error}") from error
    share_weights(folder)
    if dtype is not None:
        # transformers writes the dtype of the network in memory, which differs from the dtype of the file.
        config = read_json_object(folder / "config.json") | {"dtype": str(dtype).removeprefix("torch.")}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    checkpoint.tokenizer.save_pretrained(folder)
    if checkpoint.card is not None:
        write_card(checkpoint.card, folder)


def share_weights(folder: Path) -> None:
    """Give the weights in `folder` the permissions of its config.json, because safetensors makes them private."""
    for weights in folder.glob("*.safetensors"):
        weights.chmod((folder / "config.json").stat().st_mode)


def _cast(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    # Tied tensors must stay one tensor, because this is how transformers recognises them when it saves.
    cast_once: dict[tuple[int, torch.Size], torch.Tensor] = {}
    result = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in cast_once:
            cast_once[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        result[name] = cast_once[key]
    return result
