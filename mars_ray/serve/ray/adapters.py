"""Ray shell: the adapters of a model in the cluster's key-value store, where its engines read them.

The manager of models writes them. An engine reads them when it starts, once a second, and when a request names an
adapter that it does not know, so that an engine that has just started refuses no request.
"""

import json
from collections.abc import Mapping

from mars_ray.ray_private import kv_get, kv_put


def put_adapters(controller: str, adapters: Mapping[str, str]) -> None:
    """Store the names and folders of the adapters of the model with this controller."""
    kv_put(_key(controller), json.dumps(dict(adapters)))


def get_adapters(controller: str) -> dict[str, str] | None:
    """Return the names and folders of the adapters; None if nobody has stored them."""
    saved = kv_get(_key(controller))
    return json.loads(saved) if saved else None


def _key(controller: str) -> str:
    return f"adapters:{controller}"
