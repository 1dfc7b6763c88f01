"""Check the headers of a model folder's weights, and count the parameters in the same pass.

In:    a folder.
Out:   the counts; or an error if transformers would fail, warn or unpickle.
Never: reads a tensor, or opens a pickle.
"""

from collections import Counter
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mars_ray.errors import ModelError, UnsafeModelError
from mars_ray.model.json_object import read_json_object

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.distcp")
_HOW_TO_CONVERT = (
    "Only safetensors weights are read, because a pickle can run any code when opened. "
    "Convert a model you trust once: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
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
