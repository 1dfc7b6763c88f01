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
        self._requests = np.zeros((replicas, len(classes), self._size, len(FIELDS)))
        self._head: Ints = np.zeros((replicas, len(classes)), np.int64)
        self.waiting: Ints = np.zeros((replicas, len(classes)), np.int64)
        self._served = np.zeros((replicas, len(classes)))
        """Tokens of each class for its share."""
        self._level = np.zeros(replicas)
        """What the class that was next last had been served then."""

    def add(self, replica: Ints, of_class: Ints, requests: Floats) -> NDArray[np.bool_]:
        """Queue requests in order of arrival; return which found a place."""
        queue = replica * self.waiting.shape[1] + of_class
        order = np.argsort(queue, kind="stable")
        ordered = queue[order]
        begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        number = np.arange(len(queue))
        rank = np.empty(len(queue), np.int64)
        rank[order] = number - np.repeat(begins, np.diff(np.concatenate([begins, [len(queue)]])))
        place = self.waiting.ravel()[queue] + rank
        fits: NDArray[np.bool_] = place < self._places[of_class]
        if not fits.all():
            queue, place, requests = queue[fits], place[fits], requests[fits]
        if self.waiting.shape[1] > 1:
            replica, of_class = queue // self.waiting.shape[1], queue % self.waiting.shape[1]
            joins = self.waiting.ravel()[queue] == 0
            here = replica[joins], of_class[joins]
            self._served[here] = np.maximum(self._served[here], self._level[here[0]])
        at = (self._head.ravel()[queue] + place) % self._size
        self._requests.reshape(-1, len(FIELDS))[queue * self._size + at] = requests
        self.waiting += np.bincount(queue, minlength=self.waiting.size).reshape(self.waiting.shape)
        return fits

    def pop(self, replica: Ints, of_class: Ints) -> Floats:
        """Take the head of one queue of each of these replicas."""
        self._level[replica] = self._served[replica, of_class]
        head = self._head[replica, of_class]
        self._head[replica, of_class] = (head + 1) % self._size
        self.waiting[replica, of_class] -= 1
        found: Floats = self._requests[replica, of_class, head]
        return found

    def next(self, replica: Ints) -> Ints:
        """Return the class whose turn it is on each of these replicas, on all of which somebody waits."""
        if self.waiting.shape[1] == 1:
            return np.zeros(len(replica), np.int64)
        waits = self.waiting[replica] > 0
        first = _least(np.where(waits, -self._priority, np.inf))
        fewest = _least(np.where(first, self._served[replica], np.inf))
        at = replica[:, None], np.arange(self.waiting.shape[1]), self._head[replica]
        turn: Ints = np.where(fewest, self._requests[(*at, ARRIVAL)], np.inf).argmin(axis=1)
        return turn

    def served(self, tokens: Floats) -> None:
        """Note how many tokens each class was served on each replica, of prompts or answers."""
        self._served += tokens / self._share


def _least(values: Floats) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = values == values.min(axis=1, keepdims=True)
    return found & np.isfinite(values)
