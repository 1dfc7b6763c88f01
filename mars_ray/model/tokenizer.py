"""Check and load the tokenizer of a model folder without running code from it.

In:    a folder and the configuration of its network.
Out:   the tokenizer that AutoTokenizer would return after the folder is saved again, so that token ids are the same
       everywhere.
Never: runs a tokenizer class from outside transformers, or contacts a hub.
"""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, Qwen2Tokenizer, TokenizersBackend
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from mars_ray.errors import ModelError, UnsafeModelError
from mars_ray.model.json_object import read_json_object

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

# Without one of these sets of files, some tokenizer classes silently use an empty vocabulary.
_VOCABULARIES = ((TOKENIZER_FILE,), ("tokenizer.model",), ("vocab.json", "merges.txt"))


def check_tokenizer(folder: Path, config: PretrainedConfig) -> bool:
    """Return whether the tokenizer is custom. Raises `ModelError` if it is missing or only works with its own code."""
    settings_file = folder / TOKENIZER_CONFIG_FILE
    settings = read_json_object(settings_file) if settings_file.is_file() else {}
    class_name = settings.get("tokenizer_class") or getattr(config, "tokenizer_class", None)
    custom = "auto_map" in settings or (class_name is not None and not _is_built_in(class_name))
    if custom and not (folder / TOKENIZER_FILE).is_file():
        raise UnsafeModelError(
            f"{folder}: the tokenizer {class_name!r} needs the code that came with it, and such code is never run. "
            f"Give a folder with a {TOKENIZER_FILE}."
        )
    if not any(all((folder / name).is_file() for name in names) for names in _VOCABULARIES):
        raise ModelError(f"{folder} has no tokenizer: expected {TOKENIZER_FILE}.")
    return custom


def load_tokenizer(folder: Path, config: PretrainedConfig, custom: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder; `custom` is the result of `check_tokenizer`."""
    try:
        if custom:
            tokenizer = _class_of_custom(config).from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), config=config, local_files_only=True, trust_remote_code=False
            )
    # The Rust library raises bare Exceptions for a malformed tokenizer.json.
    except Exception as error:
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
    for name in ("auto_map", "is_local", "local_files_only"):  # they would be saved with the tokenizer
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def _class_of_custom(config: PretrainedConfig) -> Any:
    # AutoTokenizer opens every qwen2 folder with Qwen2Tokenizer, whatever class the folder names. Using the same class
    # here keeps ids equal before and after saving.
    return Qwen2Tokenizer if config.model_type == "qwen2" else TokenizersBackend


def _is_built_in(class_name: object) -> bool:
    # transformers searches all its exports for the name, including models and pipelines.
    exported = tokenizer_class_from_name(class_name) if isinstance(class_name, str) else None
    return isinstance(exported, type) and issubclass(exported, PreTrainedTokenizerBase)
