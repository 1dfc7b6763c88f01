"""Queues of all simulated replicas, which follow the rules of `engine/scheduling/waiting_queue`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mars_ray.engine.service_class import ServiceClass

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
        self._capacity = np.array([max(1, int(queue_max * share / sum(shares))) for share in shares])
        self._size = int(self._capacity.max())
        self._requests = np.zeros((self._size, replicas * len(classes), len(FIELDS)))
        """Interleaved ring buffers of all queues, so that the few requests in them are close in memory."""
        self._head: Ints = np.zeros((replicas, len(classes)), np.int64)
        self.waiting: Ints = np.zeros((replicas, len(classes)), np.int64)
        self._served = np.zeros((replicas, len(classes)))
        """Tokens served to each class, divided by its share."""
        self._level = np.zeros(replicas)
        """Value of `_served` for the class served last, by replica."""

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
            replica = joins // classes
            joining = replica, joins % classes
            self._served[joining] = np.maximum(self._served[joining], self._level[replica])
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
            self._level[queue // classes] = self._served.ravel()[queue]
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
