"""Rank replicas for a request: first one that has the request's beginning cached, unless it is much busier than others.

In:    the keys of a request, and the number of requests on each replica.
Out:   replicas, best first.
Never: waits, or lets a queue grow at a preferred replica while another one is idle.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from mars_ray.engine.request import Request

PREFIX_TOKENS = 64
"""Number of leading prompt tokens that form the first key. They are the start of a system prompt or a conversation."""

SLACK = 4
"""Number of requests that a replica may have more than the least loaded one and still be preferred for its cache."""


def prefix_keys(request: Request) -> list[str]:
    """Return the keys of a request, the one of most requests first: its first tokens, then its session.

    So the conversations that share a system prompt meet at one replica until it is too busy for more of them, and those
    that it leaves to others stay where they went. Keys include the tenant because tenants share no cache.
    """
    return [f"{request.tenant}|{request.prompt[:PREFIX_TOKENS]}", f"{request.tenant}|{request.session}"]


def ranked(keys: Sequence[str], loads: Mapping[str, int], slack: int = SLACK) -> list[str]:
    """Return the replicas in `loads`, best first.

    Rendezvous hashing makes sure that adding or removing a replica moves only the keys of this replica.
    """
    by_load = sorted(loads, key=lambda replica: (loads[replica], _weight(keys[0], replica)))
    for key in keys:
        preferred = max(loads, key=lambda replica: _weight(key, replica))
        if loads[preferred] <= loads[by_load[0]] + slack:
            return [preferred, *(replica for replica in by_load if replica != preferred)]
    return by_load


def _weight(key: str, replica: str) -> bytes:
    return blake2b(f"{key}@{replica}".encode(), digest_size=8).digest()
