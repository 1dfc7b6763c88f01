"""Rank replicas for a request: first the one that has the request's prefix cached, unless it is much busier than
others.

In:    the key of a request, and the number of requests on each replica.
Out:   replicas, best first.
Never: waits, or lets a queue grow at the preferred replica while another one is idle.
"""

from collections.abc import Mapping
from hashlib import blake2b

PREFIX_TOKENS = 64
"""Number of leading prompt tokens that form the key. They are the start of a system prompt or a conversation."""

SLACK = 4
"""Number of requests that a replica may have more than the least loaded one and still be preferred for its cache."""


def prefix_key(tenant: str, prompt: tuple[int, ...]) -> str:
    """Return the key of a request. It includes the tenant because tenants share no cache."""
    return f"{tenant}|{prompt[:PREFIX_TOKENS]}"


def ranked(key: str, loads: Mapping[str, int], slack: int = SLACK) -> list[str]:
    """Return the replicas in `loads`, best first.

    Rendezvous hashing makes sure that adding or removing a replica moves only the keys of this replica.
    """
    by_load = sorted(loads, key=lambda replica: (loads[replica], _weight(key, replica)))
    preferred = max(loads, key=lambda replica: _weight(key, replica))
    if loads[preferred] > loads[by_load[0]] + slack:
        return by_load
    return [preferred, *(replica for replica in by_load if replica != preferred)]


def _weight(key: str, replica: str) -> bytes:
    return blake2b(f"{key}@{replica}".encode(), digest_size=8).digest()
