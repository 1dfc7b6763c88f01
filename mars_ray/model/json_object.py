"""Read a JSON object from a file of a model folder."""

import json
from pathlib import Path
from typing import Any

from mars_ray.errors import ModelError


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises `ModelError` if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}. Download or save the model again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}; it must hold an object.")
    return content
