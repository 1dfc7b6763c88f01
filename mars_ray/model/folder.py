"""Resolve a model: find its folder, check the files in it, and read everything but the weights.

In:    the name of a model, or a folder.
Out:   a ResolvedModel.
Never: runs code from the folder, opens a pickle, or reads more of the weights than their headers.
"""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from mars_ray.errors import ModelError
from mars_ray.model.architecture import decoder_config
from mars_ray.model.card import Card, read_card
from mars_ray.model.dtype import DtypeOrAuto, ResolvedDtype, resolve_dtype
from mars_ray.model.json_object import read_json_object
from mars_ray.model.resolve import as_name, pin, resolve_model
from mars_ray.model.tokenizer import check_tokenizer, load_tokenizer
from mars_ray.model.weights import count_parameters
from mars_ray.storage.location import AnyPath


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A checked model folder and the contents of its small files."""

    folder: Path
    name: str
    """Name that finds the same files again: with the commit if the model is from a hub."""
    config: PretrainedConfig
    card: Card | None
    dtype: ResolvedDtype
    """Dtype to load the weights in."""
    tokenizer_is_custom: bool
    """True if the tokenizer requires code of its own; tokenizer.json is read instead."""
    parameters: Counter[str]
    """Number of parameters of each dtype in the checkpoint, by their names in safetensors."""

    @property
    def max_positions(self) -> int:
        """Maximum length of a sequence, in tokens."""
        length: int = self.config.get_text_config().max_position_embeddings
        return length

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer. Raises `ModelError` if it cannot be loaded."""
        return load_tokenizer(self.folder, self.config, self.tokenizer_is_custom)


def open_model(name: str | AnyPath, dtype: DtypeOrAuto = "auto", device: str = "cpu") -> ResolvedModel:
    """Find the model `name`, fetch it if needed, and check it; dtype "auto" depends on `device`."""
    folder = resolve_model(name).absolute()
    return replace(check_folder(folder, dtype, device), name=pin(str(as_name(name)), folder))


def check_folder(folder: Path, dtype: DtypeOrAuto = "auto", device: str = "cpu") -> ResolvedModel:
    """Check a model folder; dtype "auto" depends on `device`. Raises `ModelError` for missing or unsafe files."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise ModelError(
            f"{folder} {problem}. Expected a folder with config.json, model.safetensors and tokenizer.json."
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json. Expected a folder saved by transformers or by mars-ray.")
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{folder} holds an adapter. Merge it into its model (peft: merge_and_unload) and save the result."
        )
    config = decoder_config(read_json_object(folder / "config.json"), folder)
    parameters = count_parameters(folder)
    return ResolvedModel(
        folder=folder,
        name=str(folder),
        config=config,
        tokenizer_is_custom=check_tokenizer(folder, config),
        card=read_card(folder),
        dtype=resolve_dtype(dtype, parameters, device),
        parameters=parameters,
    )
