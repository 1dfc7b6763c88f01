"""One JSON line per request.

In:    exchanges that are over.
Out:   lines of the logger `mars_ray.requests`; an operator points it where lines should go.
Never: logs an answer or a key (its name is there), or a prompt unless the operator asked for it.
"""

import json
import logging
from dataclasses import asdict

from mars_ray.serve.middleware.exchange import Exchange

PATH_CHARS = 200
"""Characters of a path that are logged: strangers choose it, and each may become six of JSON."""

log = logging.getLogger("mars_ray.requests")


def log_exchange(exchange: Exchange) -> None:
    """Write the line of an exchange. Open paths are asked every few seconds and are left out."""
    if exchange.key is not None or exchange.code is not None:
        fields = asdict(exchange)
        fields |= fields.pop("usage") or {}
        fields["path"] = exchange.path[:PATH_CHARS]
        log.info(json.dumps({name: _rounded(value) for name, value in fields.items() if value is not None}))


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value
