"""Choose the replica a request goes to, by the rule of `serve/replicas/prefix_routing`, for many requests at once.

A request prefers one replica, and goes to the least loaded where that one has `SLACK` more than it. Which replica has
seen the beginning of its prompt is drawn.
"""

import numpy as np
from numpy.typing import NDArray

SLACK = 4
"""The value in `serve/replicas/prefix_routing`."""
AT_ONCE = 0.5
"""Requests routed by the same counts, for each replica."""

Counts = NDArray[np.int64]


def route(in_flight: Counts, up: Counts, requests: int, random: np.random.Generator) -> Counts:
    """Return a replica of `up` for each request, and count them in `in_flight`."""
    preferred = up[random.integers(len(up), size=requests)]
    chosen = preferred.copy()
    size = max(1, int(AT_ONCE * len(up)))
    for start in range(0, requests, size):
        part = slice(start, start + size)
        loads = in_flight[up]
        busy = np.flatnonzero(in_flight[preferred[part]] > loads.min() + SLACK)
        if len(busy):
            # Each of them takes one of the least loaded; among equals by lot, as equals are ranked by a hash.
            drawn = loads + random.random(len(up))
            least = np.argpartition(drawn, min(len(busy), len(up)) - 1)[: len(busy)]
            chosen[start + busy] = up[least[np.arange(len(busy)) % len(least)]]
        np.add.at(in_flight, chosen[part], 1)
    return chosen
