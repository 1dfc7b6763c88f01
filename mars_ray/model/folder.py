"""Look at a model folder before anything in it is loaded.

In:    a path.
Out:   a ModelFolder: what loading needs to know.
Never: runs code from the folder, opens a pickle, contacts a hub, reads weights beyond their headers.
"""

from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from mars_ray.errors import ModelError
from mars_ray.model.architecture import decoder_config
from mars_ray.model.json_object import read_json_object
from mars_ray.model.tokenizer import check_tokenizer
from mars_ray.model.weights import check_weights


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that passed every check that needs no weights in memory."""

    path: Path
    config: PretrainedConfig
    tokenizer_is_custom: bool
    """Whether the tokenizer names code of its own; tokenizer.json is read instead."""


def check_folder(path: Path) -> ModelFolder:
    """Return what was found at `path`, or raise a `ModelError` that says what is missing or unsafe."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ModelError(f"{path} {what}. Expected a folder with config.json, model.safetensors and tokenizer.json.")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json. Expected a folder saved by transformers or by mars-ray.")
    if (path / "adapter_config.json").is_file():
        raise ModelError(f"{path} holds an adapter. Merge it into its model (peft: merge_and_unload) and save that.")
    config = decoder_config(read_json_object(path / "config.json"), path)
    check_weights(path)
    return ModelFolder(path=path, config=config, tokenizer_is_custom=check_tokenizer(path, config))
