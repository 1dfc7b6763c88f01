"""Resolve a model: find its folder, check the files in it, and read everything but the weights.

In:    the name of a model, or a folder.
Out:   a ResolvedModel; the tokenizer that AutoTokenizer would return after the folder is saved again, so that token ids
       are the same everywhere; or an error if transformers would fail, warn or unpickle.
Never: runs code from the folder, opens a pickle, contacts a hub for a tokenizer, or reads more of the weights than
       their headers.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, Qwen2Tokenizer, TokenizersBackend
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from mars_ray.errors import ModelError, UnsafeModelError
from mars_ray.model.architecture import decoder_config
from mars_ray.model.card import Card, read_card
from mars_ray.model.dtype import DtypeOrAuto, ResolvedDtype, resolve_dtype
from mars_ray.model.json_object import read_json_object
from mars_ray.model.resolve import pin, resolve_model
from mars_ray.storage.location import AnyPath

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.distcp")
_HOW_TO_CONVERT = (
    "Only safetensors weights are read, because a pickle can run any code when opened. "
    "Convert a model you trust once: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
)

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

# Without one of these sets of files, some tokenizer classes silently use an empty vocabulary.
_VOCABULARIES = ((TOKENIZER_FILE,), ("tokenizer.model",), ("vocab.json", "merges.txt"))


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

    @property
    def sliding_window(self) -> int | None:
        """Number of tokens that the layers with a sliding window see; None if no layer has one."""
        config = self.config.get_text_config()
        types = getattr(config, "layer_types", None)
        if types is not None and "sliding_attention" not in types:
            return None
        window: int | None = getattr(config, "sliding_window", None)
        return window if getattr(config, "use_sliding_window", True) else None

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer. Raises `ModelError` if it cannot be loaded."""
        return load_tokenizer(self.folder, self.config, self.tokenizer_is_custom)


def open_model(name: str | AnyPath, dtype: DtypeOrAuto = "auto", device: str = "cpu") -> ResolvedModel:
    """Find the model `name`, fetch it if needed, and check it; dtype "auto" depends on `device`."""
    folder = resolve_model(name).absolute()
    return replace(check_folder(folder, dtype, device), name=pin(name, folder))


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
        dtype=resolve_dtype(dtype, parameters, device, config.model_type),
        parameters=parameters,
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files. Raises `ModelError` if files are missing."""
    # transformers would load the shards of a distributed run instead of other files in the folder.
    if any(folder.glob("shard-*-model-*.safetensors")):
        raise ModelError(f"{folder} holds the shards of a distributed run. Save it as one {WEIGHTS_FILE} first.")
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if (folder / INDEX_FILE).is_file():
        return _shards(folder)
    raise _no_weights(folder)


def count_parameters(folder: Path) -> Counter[str]:
    """Return the number of parameters of each dtype.

    Raises `ModelError` unless `folder` holds model.safetensors, or an index and every shard that it names, each with a
    complete header.
    """
    counts = Counter[str]()
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="numpy") as weights:
                for name in weights.keys():  # noqa: SIM118
                    tensor = weights.get_slice(name)
                    counts[tensor.get_dtype()] += prod(tensor.get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} is not a complete safetensors file: {error}. Download or save it again."
            ) from error
    return counts


def _no_weights(folder: Path) -> ModelError:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        return ModelError(f"{folder} holds {others[0]} but neither {WEIGHTS_FILE} nor {INDEX_FILE}.")
    if pickles:
        return UnsafeModelError(f"{folder} holds its weights as a pickle ({pickles[0]}). {_HOW_TO_CONVERT}")
    return ModelError(f"{folder} holds no weights: expected {WEIGHTS_FILE} or {INDEX_FILE}.")


def _shards(folder: Path) -> list[Path]:
    weight_map = read_json_object(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX_FILE} has no weight_map. Download or save the model again.")
    names = sorted({str(name) for name in weight_map.values()})
    strange = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if strange:
        raise UnsafeModelError(f"{folder / INDEX_FILE} names {strange[0]!r}, which is not a safetensors file in it.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of the {len(names)} weight files its index names: "
            f"{', '.join(missing[:3])}. Download or save the model again."
        )
    return [folder / name for name in names]


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
            # AutoTokenizer opens every qwen2 folder with Qwen2Tokenizer, whatever class the folder names. Using the
            # same class here keeps ids equal before and after saving.
            kind: Any = Qwen2Tokenizer if config.model_type == "qwen2" else TokenizersBackend
            tokenizer = kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
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


def _is_built_in(class_name: object) -> bool:
    # transformers searches all its exports for the name, including models and pipelines.
    exported = tokenizer_class_from_name(class_name) if isinstance(class_name, str) else None
    return isinstance(exported, type) and issubclass(exported, PreTrainedTokenizerBase)
