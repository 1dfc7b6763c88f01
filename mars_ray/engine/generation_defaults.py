"""Default sampling parameters of a model, from its `generation_config.json`, which transformers and vLLM also read.

If the file is missing or does not set `do_sample`, decoding is greedy, as in transformers.
"""

from pathlib import Path
from typing import Any

from mars_ray.engine.request import SamplingParams
from mars_ray.errors import ModelError, RequestError
from mars_ray.model.json_object import read_json_object

FILE = "generation_config.json"
NAMES = ("top_p", "top_k", "repetition_penalty")


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the file in `folder` sets. Raises `ModelError` for invalid values."""
    config = read_json_object(folder / FILE) if (folder / FILE).exists() else {}
    defaults = {name: config[name] for name in NAMES if config.get(name) is not None}
    defaults["temperature"] = config.get("temperature") or 1.0 if config.get("do_sample") else 0.0
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ModelError(f"{folder / FILE}: {error}") from None
    return defaults
