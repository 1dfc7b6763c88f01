"""Sequences that wait for a slot of the cache, by class of service.

Within a class: first come, first served. A class of higher priority goes before one of lower. Among classes of one
priority the next is of the one that was served fewest tokens for its share (the virtual token counter of Sheng et al.,
"Fairness in Serving Large Language Models", arXiv 2401.00588), so over time each has its share of the tokens, and none
starves, however long the answers of others. A class that comes late does not make up for when it was not there.
"""

from collections import abc, deque

from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.service_class import ServiceClass
from mars_ray.errors import QueueFullError, RequestError


class WaitingQueue:
    """Queues that hold `max_waiting_seqs` sequences together; each class has places according to its share."""

    def __init__(self, classes: abc.Sequence[ServiceClass], max_waiting_seqs: int) -> None:
        self._classes = {each.name: each for each in classes}
        self._queues: dict[str, deque[Sequence]] = {each.name: deque() for each in classes}
        self._served = dict.fromkeys(self._classes, 0.0)
        """Tokens each class was served, divided by its share."""
        self._level = 0.0
        """`_served` of the class that was next last, as it was then."""
        shares = sum(each.share for each in classes)
        self._places = {each.name: max(1, int(max_waiting_seqs * each.share / shares)) for each in classes}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> abc.Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def count(self, name: str) -> int:
        """Return how many sequences of a class wait."""
        return len(self._queues[name])

    def add(self, sequences: abc.Sequence[Sequence]) -> None:
        """Queue the sequences of a request.

        Raises `QueueFullError` when there is no place for all of them, and `RequestError` when there never is.
        """
        name = sequences[0].service_class
        queue, places = self._queues[name], self._places[name]
        if len(sequences) > places:
            raise RequestError(f"n is {len(sequences)}; at most {places} sequences of class {name} may wait.")
        if len(queue) + len(sequences) > places:
            raise QueueFullError(
                f"{len(queue)} sequences wait and {places} may: there is no place for {len(sequences)} more. "
                "Try again later."
            )
        if not queue:
            self._served[name] = max(self._served[name], self._level)
        queue.extend(sequences)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a preempted sequence before all others of its class."""
        self._queues[sequence.service_class].appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._queues[sequence.service_class].remove(sequence)

    def next(self) -> Sequence | None:
        """Return the sequence that gets the next slot; None when none waits."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        return min(heads, key=self._order, default=None)

    def take(self) -> Sequence:
        """Remove and return the next sequence. There must be one."""
        head = self.next()
        assert head is not None
        self._level = self._served[head.service_class]
        return self._queues[head.service_class].popleft()

    def served(self, name: str, tokens: int) -> None:
        """Record that a class was served tokens, of a prompt or an answer."""
        self._served[name] += tokens / self._classes[name].share

    def _order(self, head: Sequence) -> tuple[int, float, float]:
        return -self._classes[head.service_class].priority, self._served[head.service_class], head.added_s
