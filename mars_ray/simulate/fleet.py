"""The engines of a simulated cluster: their queues, thresholds and totals.

`SteppedFleet` simulates a few engines step by step, `FluidFleet` many engines in ticks. Cache memory and shared
prefixes are not modelled.

Letters: `N` replicas, `C` classes, `S` sequences.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mars_ray.engine.service_class import ServiceClass
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.queues import Floats, Ints, Queues
from mars_ray.simulate.threshold_curves import ThresholdCurves


class Fleet(ABC):
    """The engines of all replicas. Totals by replica and class count from the start, as in an `EngineState`."""

    def __init__(
        self, machine: Machine, classes: Sequence[ServiceClass], replicas: int, threshold: float, watched: int
    ) -> None:
        self._machine = machine
        by_class = (replicas, len(classes))
        self.queues = Queues(replicas, classes, machine.max_waiting_seqs)
        self.held_NC: Ints = np.zeros(by_class, np.int64)
        """Slots in use."""
        self.in_flight_N: Ints = np.zeros(replicas, np.int64)
        """Number of requests in flight. The router counts a request before the request is queued."""
        self._curves = ThresholdCurves(machine, replicas, len(classes), threshold)
        self.block_N: Ints = np.ones(replicas, np.int64)
        self.arrived_NC: Ints = np.zeros(by_class, np.int64)
        self.prompt_tokens_NC = np.zeros(by_class)
        self.ended_NC: Ints = np.zeros(by_class, np.int64)
        self.ended_tokens_NC = np.zeros(by_class)
        self.tokens_NC = np.zeros(by_class)
        """Tokens generated, including those of running sequences."""
        self._watched = watched
        """Number of replicas whose latencies are kept."""
        self.firsts: list[tuple[Ints, Floats]] = []
        """Replicas and times to first token, measured since the list was last emptied."""
        self.paces: list[tuple[Ints, Floats]] = []
        """Replicas and times per token after the first, of sequences that ended since the list was last emptied."""

    @property
    def thresholds_NC(self) -> Floats:
        """The threshold of each class on each replica."""
        return self._curves.thresholds_NC

    @property
    def threshold_changes_N(self) -> Ints:
        """Number of threshold changes on each replica since the start."""
        return self._curves.changes_N

    @property
    @abstractmethod
    def kv_tokens_N(self) -> Floats:
        """Number of tokens that the running sequences of each replica attend to."""

    def set_thresholds(self, thresholds_NC: Floats) -> None:
        """Set the threshold of each class on each replica."""
        self._curves.set(thresholds_NC)

    def add(self, replica: Ints, of_class: Ints, arrival: Floats, prompt: Floats, total: Floats) -> NDArray[np.bool_]:
        """Queue requests that are already counted in `in_flight_N`; return a mask of the accepted ones."""
        group = replica * self.held_NC.shape[1] + of_class
        self.arrived_NC += self._by_class(group)
        self.prompt_tokens_NC += self._by_class(group, prompt)
        fits = self.queues.add(group, np.array([arrival, prompt, total]).T)
        if not fits.all():
            np.subtract.at(self.in_flight_N, replica[~fits], 1)
        return fits

    @abstractmethod
    def advance(self, begin_s: float, end_s: float) -> Floats:
        """Run a tick. Return arrival, first token and end in seconds, and tokens, of the ended sequences: [4, S]."""

    def _by_class(self, group: Ints, weights: Floats | None = None) -> NDArray[Any]:
        """Return the count, or the sum of the weights, for each class on each replica."""
        return np.bincount(group, weights, self.held_NC.size).reshape(self.held_NC.shape)
