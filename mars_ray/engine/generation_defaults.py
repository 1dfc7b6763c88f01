"""How a model is sampled where nobody says: as its `generation_config.json` has it, which transformers and vLLM read.

Where that does not ask to sample, as where there is none, the most likely token is taken (transformers' own default).
"""

from pathlib import Path
from typing import Any

from mars_ray.engine.request import SamplingParams
from mars_ray.errors import ModelError, RequestError
from mars_ray.model.json_object import read_json_object

FILE = "generation_config.json"
NAMES = ("top_p", "top_k", "repetition_penalty")


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Return fields of `SamplingParams` that the model in `folder` comes with. Raises `ModelError` for useless ones."""
    config = read_json_object(folder / FILE) if (folder / FILE).exists() else {}
    found = {name: config[name] for name in NAMES if config.get(name) is not None}
    found["temperature"] = config.get("temperature") or 1.0 if config.get("do_sample") else 0.0
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ModelError(f"{folder / FILE}: {error}") from None
    return found
