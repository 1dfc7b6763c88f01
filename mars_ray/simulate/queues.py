"""The queues of all simulated replicas, and who is next, by the rules of `engine/scheduling/waiting_queue`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mars_ray.engine.service_class import ServiceClass

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FIELDS = ARRIVAL, PROMPT, TOTAL = range(3)
"""Columns of a request: when it came, tokens to read, tokens to write."""


class Queues:
    """The queues of all replicas, one for each class."""

    def __init__(self, replicas: int, classes: Sequence[ServiceClass], queue_max: int) -> None:
        shares = [each.share for each in classes]
        self._share = np.array(shares)
        self._priority = np.array([float(each.priority) for each in classes])
        self._places = np.array([max(1, int(queue_max * share / sum(shares))) for share in shares])
        self._size = int(self._places.max())
        self._requests = np.zeros((self._size, replicas * len(classes), len(FIELDS)))
        """Rings, side by side: what lies in them is a small part of them, and close together."""
        self._head: Ints = np.zeros((replicas, len(classes)), np.int64)
        self.waiting: Ints = np.zeros((replicas, len(classes)), np.int64)
        self._served = np.zeros((replicas, len(classes)))
        """Tokens of each class for its share."""
        self._level = np.zeros(replicas)
        """What the class that was next last had been served then."""

    def add(self, queue: Ints, requests: Floats) -> NDArray[np.bool_]:
        """Queue requests in order of arrival, queues counted through all replicas; return which found a place."""
        order = np.argsort(queue, kind="stable")
        ordered = queue[order]
        rank = np.empty(len(queue), np.int64)
        rank[order] = np.arange(len(queue)) - np.searchsorted(ordered, ordered)
        waiting, classes = self.waiting.ravel(), self.waiting.shape[1]
        place = waiting[queue] + rank
        fits: NDArray[np.bool_] = place < self._places[queue % classes]
        if not fits.all():
            queue, place, requests = queue[fits], place[fits], requests[fits]
        if classes > 1:
            joins = queue[waiting[queue] == 0]
            here = joins // classes, joins % classes
            self._served[here] = np.maximum(self._served[here], self._level[here[0]])
        at = (self._head.ravel()[queue] + place) % self._size
        self._requests.reshape(-1, len(FIELDS))[at * self.waiting.size + queue] = requests
        self.waiting += np.bincount(queue, minlength=self.waiting.size).reshape(self.waiting.shape)
        return fits

    def pop(self, queue: Ints) -> Floats:
        """Take the heads of these queues, one of each replica."""
        classes, head, waiting = self.waiting.shape[1], self._head.ravel()[queue], self.waiting.ravel()[queue] - 1
        if classes > 1:
            self._level[queue // classes] = self._served.ravel()[queue]
        # A ring that is empty begins anew, so that most use nothing but their beginning.
        self._head.ravel()[queue] = np.where(waiting > 0, (head + 1) % self._size, 0)
        self.waiting.ravel()[queue] = waiting
        found: Floats = self._requests.reshape(-1, len(FIELDS)).take(head * self.waiting.size + queue, axis=0)
        return found

    def next(self, replica: Ints) -> Ints:
        """Return the queue whose turn it is on each of these replicas, on all of which somebody waits."""
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

    def served(self, tokens_NC: Floats) -> None:
        """Note how many tokens of answers each class was served on each replica."""
        if len(self._share) > 1:
            self._served += tokens_NC / self._share

    def served_prompts(self, queue: Ints, tokens: Floats) -> None:
        """Note how many tokens of a prompt were read for each of these queues."""
        if len(self._share) > 1:
            self._served.ravel()[queue] += tokens / self._share[queue % len(self._share)]


def _least(values: Floats) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = values == values.min(axis=1, keepdims=True)
    return found & np.isfinite(values)
