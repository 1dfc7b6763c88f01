"""Sequences that wait for a slot of the cache, in one queue per service class.

Within a class, sequences are served in order of arrival. Classes of higher priority are served first. Among classes of
equal priority, the next sequence comes from the class that was served the fewest tokens relative to its share: the
virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588. So each class gets
its share of the tokens over time, and none starves, however long the answers of other classes are. A class that was
idle does not catch up on the tokens it did not use.
"""

from collections import abc, deque

from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.service_class import ServiceClass, waiting_places
from mars_ray.errors import QueueFullError, RequestError


class WaitingQueue:
    """One queue per class. Together they hold `max_waiting_seqs` sequences, divided among the classes by share."""

    def __init__(self, classes: abc.Sequence[ServiceClass], max_waiting_seqs: int) -> None:
        self._classes = {service_class.name: service_class for service_class in classes}
        self._queues: dict[str, deque[Sequence]] = {name: deque() for name in self._classes}
        self._served = dict.fromkeys(self._classes, 0.0)
        """Number of tokens served to each class, divided by the share of the class."""
        self._taken_last: dict[int, str] = {}
        """The class whose sequence was taken last, by priority."""
        self._places = waiting_places(classes, max_waiting_seqs)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> abc.Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def count(self, name: str) -> int:
        """Return the number of waiting sequences of a class."""
        return len(self._queues[name])

    def priority(self, name: str) -> int:
        """Return the priority of a class."""
        return self._classes[name].priority

    def add(self, sequences: abc.Sequence[Sequence]) -> None:
        """Queue the sequences of a request. Answers that another engine began go first and are never refused.

        Raises `QueueFullError` if not all of them fit now, and `RequestError` if they never fit.
        """
        name = sequences[0].service_class
        queue = self._queues[name]
        places = self._places[name]
        begun = bool(sequences[0].request.partial_answers)
        if len(sequences) > places:
            raise RequestError(f"n is {len(sequences)}; at most {places} sequences of class {name} may wait.")
        if len(queue) + len(sequences) > places and not begun:
            raise QueueFullError(
                f"class {name} has {len(queue)} waiting sequences, of at most {places}; {len(sequences)} more do not "
                "fit. Try again later."
            )
        if not queue:
            self._served[name] = max(self._served[name], self._level(self.priority(name)))
        if begun:
            queue.extendleft(reversed(sequences))
        else:
            queue.extend(sequences)

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence at the head of the queue of its class."""
        self._queues[sequence.service_class].appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence."""
        self._queues[sequence.service_class].remove(sequence)

    def next(self) -> Sequence | None:
        """Return the sequence that gets the next slot, or None if no sequence waits."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        return min(heads, key=self._order, default=None)

    def take(self) -> Sequence:
        """Remove and return the next sequence. At least one must be waiting."""
        head = self.next()
        assert head is not None
        self._taken_last[self.priority(head.service_class)] = head.service_class
        return self._queues[head.service_class].popleft()

    def served(self, name: str, tokens: int) -> None:
        """Record the number of tokens, of prompts or answers, that were served to a class."""
        self._served[name] += tokens / self._classes[name].share

    def _level(self, priority: int) -> float:
        """Return the value of `_served` from which an idle class of this priority resumes: that of the class that is
        next, or if none waits, of the one that was taken last."""
        peers = [name for name, queue in self._queues.items() if queue and self.priority(name) == priority]
        if not peers and priority in self._taken_last:
            peers = [self._taken_last[priority]]
        return min((self._served[name] for name in peers), default=0.0)

    def _order(self, head: Sequence) -> tuple[int, float, float]:
        return -self._classes[head.service_class].priority, self._served[head.service_class], head.added_s
