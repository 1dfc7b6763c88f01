"""Rank replicas for a request: first the one that has its prefix cached, unless it is much busier than others.

In:    a request's key, and how many requests each replica has.
Out:   replicas, best first.
Never: waits, or lets affinity build a queue while another replica idles.
"""

from collections.abc import Mapping
from hashlib import blake2b

PREFIX_TOKENS = 64
"""Requests whose first tokens are the same share a key: a system prompt, or the conversation so far."""

SLACK = 4
"""Extra requests, compared with the least loaded replica, at which a replica is still preferred for its cache."""


def prefix_key(tenant: str, prompt: tuple[int, ...]) -> str:
    """Return the key of a request; tenants share no cache and so no key."""
    return f"{tenant}|{prompt[:PREFIX_TOKENS]}"


def ranked(key: str, loads: Mapping[str, int], slack: int = SLACK) -> list[str]:
    """Return the replicas in `loads`, best first.

    Rendezvous hashing: a replica that comes or goes moves only the keys it gains or had.
    """
    by_load = sorted(loads, key=lambda replica: (loads[replica], _weight(key, replica)))
    preferred = max(loads, key=lambda replica: _weight(key, replica))
    if loads[preferred] > loads[by_load[0]] + slack:
        return by_load
    return [preferred, *(replica for replica in by_load if replica != preferred)]


def _weight(key: str, replica: str) -> bytes:
    return blake2b(f"{key}@{replica}".encode(), digest_size=8).digest()
