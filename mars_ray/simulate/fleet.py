"""The engines of a simulated cluster: their queues, thresholds and totals.

`SteppedFleet` simulates a few engines step by step, `FluidFleet` many engines in ticks. Cache memory and shared
prefixes are not modelled. Queues follow the rules of `engine/scheduling/waiting_queue`.

Letters: `N` replicas, `C` classes, `B` blocks, `K` masks, `L` lines of a step time, `S` sequences.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mars_ray.engine.service_class import ServiceClass, waiting_places
from mars_ray.engine.stats.lookahead import Lookahead
from mars_ray.engine.stats.step_time import StepTime
from mars_ray.simulate.machine import Machine

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FIELDS = ARRIVAL, PROMPT, TOTAL = range(3)
"""Columns of a request: arrival time, prompt tokens, tokens of the answer."""


class Queues:
    """One queue per replica and class. The index of a queue is replica * classes + class."""

    def __init__(self, replicas: int, classes: Sequence[ServiceClass], queue_max: int) -> None:
        shares = [service_class.share for service_class in classes]
        self._share = np.array(shares)
        self._priority = np.array([float(service_class.priority) for service_class in classes])
        self._capacity = np.array([*waiting_places(classes, queue_max).values()])
        self._size = int(self._capacity.max())
        self._requests = np.zeros((self._size, replicas * len(classes), len(FIELDS)))
        """Interleaved ring buffers of all queues, so that the few requests in them are close in memory."""
        self._head: Ints = np.zeros((replicas, len(classes)), np.int64)
        self.waiting: Ints = np.zeros((replicas, len(classes)), np.int64)
        self._served = np.zeros((replicas, len(classes)))
        """Tokens served to each class, divided by its share."""
        self._is_peer = self._priority[:, None] == self._priority
        """Whether two classes have the same priority."""
        self._taken_last: Ints = np.full((replicas, len(classes)), -1)
        """The class whose request was taken last among those of the priority of each class; -1 for none."""

    def add(self, queue: Ints, requests: Floats) -> NDArray[np.bool_]:
        """Queue requests in order of arrival; return a mask of the accepted ones."""
        order = np.argsort(queue, kind="stable")
        ordered = queue[order]
        rank = np.empty(len(queue), np.int64)
        rank[order] = np.arange(len(queue)) - np.searchsorted(ordered, ordered)
        waiting = self.waiting.ravel()
        classes = self.waiting.shape[1]
        position = waiting[queue] + rank
        fits: NDArray[np.bool_] = position < self._capacity[queue % classes]
        if not fits.all():
            queue = queue[fits]
            position = position[fits]
            requests = requests[fits]
        if classes > 1:
            joins = queue[waiting[queue] == 0]
            joining = joins // classes, joins % classes
            self._served[joining] = np.maximum(self._served[joining], self._levels(*joining))
        row = (self._head.ravel()[queue] + position) % self._size
        self._requests.reshape(-1, len(FIELDS))[row * self.waiting.size + queue] = requests
        self.waiting += np.bincount(queue, minlength=self.waiting.size).reshape(self.waiting.shape)
        return fits

    def pop(self, queue: Ints) -> Floats:
        """Remove and return the first request of each given queue. At most one queue per replica may be given."""
        classes = self.waiting.shape[1]
        head = self._head.ravel()[queue]
        waiting = self.waiting.ravel()[queue] - 1
        if classes > 1:
            replica, taken = queue // classes, queue % classes
            self._taken_last[replica] = np.where(self._is_peer[taken], taken[:, None], self._taken_last[replica])
        # An empty ring starts again at 0, so most rings use only their first entries.
        self._head.ravel()[queue] = np.where(waiting > 0, (head + 1) % self._size, 0)
        self.waiting.ravel()[queue] = waiting
        requests: Floats = self._requests.reshape(-1, len(FIELDS)).take(head * self.waiting.size + queue, axis=0)
        return requests

    def next(self, replica: Ints) -> Ints:
        """Return the queue to serve next on each of these replicas. Each replica must have waiting requests."""
        classes = self.waiting.shape[1]
        if classes == 1:
            return replica
        queue = replica[:, None] * classes + np.arange(classes)
        waits = self.waiting[replica] > 0
        first = _least(np.where(waits, -self._priority, np.inf))
        fewest = _least(np.where(first, self._served[replica], np.inf))
        oldest_s = np.where(fewest, self._requests[self._head[replica], queue, ARRIVAL], np.inf)
        turn: Ints = replica * classes + oldest_s.argmin(axis=1)
        return turn

    def _levels(self, replica: Ints, joining: Ints) -> Floats:
        """Return the value of `_served` from which each class resumes that was idle on a replica."""
        waits = self._is_peer[joining] & (self.waiting[replica] > 0)
        least = np.where(waits, self._served[replica], np.inf).min(axis=1)
        last = self._taken_last[replica, joining]
        of_last = np.where(last >= 0, self._served[replica, last], 0.0)
        levels: Floats = np.where(np.isfinite(least), least, of_last)
        return levels

    def arrival_s(self, queue: int) -> float:
        """Return the arrival of the first request of a queue, which must have waiting requests."""
        return float(self._requests[self._head.ravel()[queue], queue, ARRIVAL])

    def served(self, tokens_NC: Floats) -> None:
        """Add the answer tokens that each class received on each replica to the class's served tokens."""
        if len(self._share) > 1:
            self._served += tokens_NC / self._share

    def served_by(self, replica: int, tokens_C: Floats) -> None:
        """Add the answer tokens of one replica to the served tokens of its classes."""
        if len(self._share) > 1:
            self._served[replica] += tokens_C / self._share

    def served_prompts(self, queue: Ints, tokens: Floats) -> None:
        """Add the prompt tokens read for each of these queues to the served tokens of its class."""
        if len(self._share) > 1:
            self._served.ravel()[queue] += tokens / self._share[queue % len(self._share)]


def _least(values: Floats) -> NDArray[np.bool_]:
    least: NDArray[np.bool_] = values == values.min(axis=1, keepdims=True)
    return least & np.isfinite(values)


class ThresholdCurves:
    """The thresholds of each class on each replica, with their tokens and costs by block."""

    def __init__(self, machine: Machine, replicas: int, classes: int, threshold: float) -> None:
        self._machine = machine
        blocks = machine.masks + 1
        self.thresholds_NC = np.full((replicas, classes), np.nan)
        # Each tick reads these two arrays in full; float32 makes that faster and is precise enough.
        self.tokens_NCB = np.ones((replicas, classes, blocks), np.float32)
        """Expected tokens of a sequence per step."""
        self.feeding_s_LNCB = np.ones((len(machine.lines), replicas, classes, blocks), np.float32)
        """Seconds that the positions of a sequence add to a step, without their attention to earlier tokens."""
        self.surplus_NCB = np.zeros((replicas, classes, blocks))
        """Expected tokens by which the last step of a sequence would exceed its answer, if the tokens of steps were
        drawn without regard to it."""
        self.changes_N: Ints = np.zeros(replicas, np.int64)
        """Number of threshold changes on each replica since the start."""
        self._by_threshold: dict[float, tuple[Floats, Floats, Floats]] = {}
        self.set(np.full((replicas, classes), threshold))
        self.changes_N[:] = 0

    def set(self, thresholds_NC: Floats) -> None:
        """Set the threshold of each class on each replica."""
        changed = thresholds_NC != self.thresholds_NC
        if not changed.any():
            return
        for value in np.unique(thresholds_NC[changed]).tolist():
            if value not in self._by_threshold:
                self._by_threshold[value] = _curves(self._machine.lookahead(value), self._machine.lines)
            where = changed & (thresholds_NC == value)
            self.tokens_NCB[where], feeding_s_LB, self.surplus_NCB[where] = self._by_threshold[value]
            self.feeding_s_LNCB[:, where] = feeding_s_LB[:, None]
        self.changes_N += changed.sum(axis=1)
        self.thresholds_NC = thresholds_NC.copy()


def _curves(lookahead: Lookahead, lines: Sequence[StepTime]) -> tuple[Floats, Floats, Floats]:
    """Return, by block, the expected tokens of a sequence, its seconds as [L, B], and the surplus of its last step.

    A sequence of n tokens that gains X tokens in each step takes (n + s) / m steps on average. Here m is the mean of X,
    and s = E[X (X - 1)] / 2m is the surplus.
    """
    tokens_B = lookahead.tokens_B
    gain_K = np.diff(tokens_B).clip(0.0)
    surplus_B = np.concatenate([[0.0], (np.arange(1, len(gain_K) + 1) * gain_K).cumsum()]) / tokens_B
    feeding_s_LB = np.array([line.seq_s + line.position_s * lookahead.positions_B for line in lines])
    return tokens_B, feeding_s_LB, surplus_B


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

    def _count_ended(self, group: Ints, requests: Floats) -> None:
        """Count sequences that end, given their queues and their columns in the form that `advance` returns."""
        _, first_s, ends_s, tokens = requests
        ended_NC = self._by_class(group)
        self.held_NC -= ended_NC
        self.ended_NC += ended_NC
        self.in_flight_N -= ended_NC.sum(axis=1)
        self.ended_tokens_NC += self._by_class(group, tokens)
        replica = group // self.held_NC.shape[1]
        watched = (replica < self._watched) & (tokens > 1)
        if watched.any():
            self.paces.append((replica[watched], (ends_s - first_s)[watched] / (tokens[watched] - 1)))

    def _by_class(self, group: Ints, weights: Floats | None = None) -> NDArray[Any]:
        """Return the count, or the sum of the weights, for each class on each replica."""
        return np.bincount(group, weights, self.held_NC.size).reshape(self.held_NC.shape)
