"""Sequences that wait for a row, by class of service.

In:    sequences with a class; how many of each class run.
Out:   who is next.
Never: lets a class of lower priority go before one of higher, or one class take what is another's share.

Within a class: first come, first served. Among classes of one priority the next is of the one that has fewest rows
for its share.
"""

from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as List

from mars_ray.engine.sequence import Sequence
from mars_ray.engine.service_class import ServiceClass
from mars_ray.errors import QueueFullError

ROUNDING = 1e-6
"""Of rows; shares such as 0.1 and 0.6 are no round numbers."""


class Waiting:
    """Queues that hold `queue_max` sequences together; each class has places according to its share of all shares."""

    def __init__(self, classes: List[ServiceClass], queue_max: int) -> None:
        self._classes = {each.name: each for each in classes}
        self._queues: dict[str, deque[Sequence]] = {each.name: deque() for each in classes}
        shares = sum(each.share for each in classes)
        self._places = {each.name: max(1, int(queue_max * each.share / shares)) for each in classes}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def of(self, name: str) -> int:
        """Return how many of a class wait."""
        return len(self._queues[name])

    def add(self, sequences: List[Sequence]) -> None:
        """Queue sequences of one class. Raises `QueueFullError` when there is no place for all of them."""
        name = sequences[0].service_class
        queue, places = self._queues[name], self._places[name]
        if len(queue) + len(sequences) > places:
            raise QueueFullError(
                f"{len(queue)} sequences wait and {places} may: there is no place for {len(sequences)} more. "
                "Try again later."
            )
        queue.extend(sequences)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence that ran before all others of its class."""
        self._queues[sequence.service_class].appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._queues[sequence.service_class].remove(sequence)

    def next(self, running: List[Sequence]) -> Sequence | None:
        """Return who gets the next row, beside those that run; None when nobody waits."""
        rows = Counter(each.service_class for each in running)
        heads = [queue[0] for queue in self._queues.values() if queue]
        return min(heads, key=lambda head: self._order(head, rows), default=None)

    def creditor(self, running: List[Sequence], rows_max: int) -> Sequence | None:
        """Return who is to give its row to the next: the youngest of a class that has more than its share.

        None when the next has to wait: its class has its share, or nobody has more than theirs.
        """
        head = self.next(running)
        if head is None:
            return None
        rows = Counter(each.service_class for each in running)
        due = self._due(rows, rows_max)
        if rows[head.service_class] + 1 > due[head.service_class] + ROUNDING:
            return None
        over = {name for name in rows if rows[name] > due[name] + ROUNDING}
        return next((each for each in reversed(running) if each.service_class in over), None)

    def _order(self, head: Sequence, rows: Counter[str]) -> tuple[float, float, float]:
        of = self._classes[head.service_class]
        return -of.priority, (rows[of.name] + 1) / of.share, head.added_s

    def _due(self, rows: Counter[str], rows_max: int) -> dict[str, float]:
        """Return the rows each class may hold for good: what those before it leave, by share, as far as it wants."""
        left, due = float(rows_max), dict.fromkeys(self._classes, 0.0)
        for priority in sorted({each.priority for each in self._classes.values()}, reverse=True):
            wants = {
                each.name: rows[each.name] + len(self._queues[each.name])
                for each in self._classes.values()
                if each.priority == priority
            }
            shares = sum(self._classes[name].share for name in wants)
            # Those who want less than their share leave the rest to the others.
            for name in sorted(wants, key=lambda name: wants[name] / self._classes[name].share):
                share = self._classes[name].share
                due[name] = min(wants[name], left * share / shares)
                left, shares = left - due[name], shares - share
        return due
