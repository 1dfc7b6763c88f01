"""Requests of a simulation, served in time slices and reproducible from a seed.

Copies of a request are made only when they arrive, so one trace can stand for millions of requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mars_ray.errors import ConfigError, EmptyDataError

SPREAD_S = 60.0
"""Seconds over which the copies of a request are spread."""

Array = NDArray[np.float64]


class Arrival(NamedTuple):
    """One request of a trace."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    service_class: int = -1
    """Index of its class of service; -1 draws one at random."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests in order of arrival."""

    arrival_s: Array
    prompt: Array
    output: Array
    service_class: NDArray[np.int64]


class Arrivals:
    """Source of requests. Each arrives `copies` times: first at its arrival time, then spread over a minute."""

    def __init__(
        self, arrivals: Sequence[Arrival], *, mix: Sequence[float] = (1.0,), copies: int = 1, seed: int = 0
    ) -> None:
        if not arrivals:
            raise EmptyDataError("The trace has no requests; give one with at least one request.")
        if copies < 1:
            raise ConfigError(f"copies is {copies}; it must be at least 1.")
        table = np.fromiter(chain.from_iterable(arrivals), float).reshape(len(arrivals), -1)
        self._at_s = table[:, 0]
        self._prompt = table[:, 1].clip(min=1)
        self._output = table[:, 2].clip(min=1)
        self._class = table[:, 3].astype(np.int64)
        if (np.diff(self._at_s) < 0).any():
            raise ConfigError("arrivals must be sorted by time.")
        self._mix = np.cumsum(np.array(mix) / sum(mix))
        self._random = np.random.default_rng([seed, 1])
        self._left = np.full(len(table), copies - 1)
        self._from_s = 0.0
        self._first = self._next = 0
        self.last_s = float(self._at_s[-1]) + (SPREAD_S if copies > 1 else 0.0)

    def until(self, end_s: float) -> Batch:
        """Return the requests that arrive before `end_s` and were not returned by an earlier call."""
        begin = self._from_s
        self._from_s = end_s
        last = int(np.searchsorted(self._at_s, end_s))
        chosen = np.arange(self._next, last)
        times = self._at_s[self._next : last]
        self._next = last
        while self._first < last and not self._left[self._first]:
            self._first += 1
        if self._first < last:
            spread = np.arange(self._first, last)
            opens_s = np.maximum(self._at_s[spread], begin)
            closes_s = self._at_s[spread] + SPREAD_S
            part = ((np.minimum(end_s, closes_s) - opens_s) / np.maximum(closes_s - opens_s, 1e-9)).clip(0, 1)
            # Copies left at the end of the minute arrive now, so that none is lost.
            part[closes_s <= end_s] = 1.0
            arriving = self._random.binomial(self._left[spread], part)
            self._left[spread] -= arriving
            copies = np.repeat(spread, arriving)
            moments = np.repeat(opens_s, arriving)
            moments = moments + self._random.random(len(copies)) * (np.maximum(end_s - moments, 0.0))
            chosen = np.concatenate([chosen, copies])
            times = np.concatenate([times, moments])
            order = np.argsort(times)
            chosen = chosen[order]
            times = times[order]
        classes = self._class[chosen]
        if len(self._mix) > 1 and (classes < 0).any():
            drawn = np.searchsorted(self._mix, self._random.random(len(classes)), side="right")
            classes = np.where(classes < 0, drawn.clip(max=len(self._mix) - 1), classes)
        return Batch(times, self._prompt[chosen], self._output[chosen], np.maximum(classes, 0))
