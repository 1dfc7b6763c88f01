"""The engines of a simulated cluster, all of them at once: rows, the reading of prompts, decoding.

A step of the engine is not simulated by itself: in a tick a replica does as many as its step time allows, and a row
gains the expected tokens of each. Every row has a clock of its own, up to which it has been worked: who arrives, ends
or has its prompt read in the middle of a tick loses nothing of it. The memory of the cache and shared prefixes are not
modelled. Prompts are read by `prefill`; what thresholds give and cost is in `threshold_curves`.

What runs lies side by side in a few arrays, whatever its replica, so that a tick is some hundred calls of numpy however
many there are; a replica has rows only for who waits for one.

Letters: `N` replicas, `R` rows, `C` classes, `B` blocks, `S` sequences that run, `M` some replicas, one row of each.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mars_ray.engine.service_class import ServiceClass
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.prefill import Prefill
from mars_ray.simulate.queues import Floats, Ints, Queues
from mars_ray.simulate.threshold_curves import ThresholdCurves


class _Running(NamedTuple):
    """Sequences that run."""

    places: Ints
    """Class, counted through all replicas, and row, counted likewise, [2, S]."""
    figures: Floats
    """Columns `CLOCK`, `LEFT`, `LENGTH`, `ARRIVAL`, `FIRST`, `TOKENS`, [6, S]."""

    def some(self, which: Ints) -> "_Running":
        """Return some of them."""
        return _Running(self.places.take(which, axis=1), self.figures.take(which, axis=1))


CLOCK, LEFT, LENGTH, ARRIVAL, FIRST, TOKENS = range(6)
"""The moment up to which a sequence was worked; tokens it still has to write; tokens once it ends; when it came and had
its first token; tokens it writes in all."""


class Fleet:
    """`replicas` engines. What is summed by replica and class is summed since the start, like in an `EngineState`."""

    def __init__(
        self, machine: Machine, classes: Sequence[ServiceClass], replicas: int, threshold: float, watched: int = 0
    ) -> None:
        self._machine, rows, by_class = machine, machine.max_num_seqs, (replicas, len(classes))
        self._times = machine.times()
        self.queues = Queues(replicas, classes, machine.max_waiting_seqs)
        self.held_NC: Ints = np.zeros(by_class, np.int64)
        """Rows in use."""
        self._held_N: Ints = np.zeros(replicas, np.int64)
        self.in_flight_N: Ints = np.zeros(replicas, np.int64)
        """Requests in flight, for the router, which counts before it queues."""
        self._running = _Running(np.zeros((2, 0), np.int64), np.zeros((6, 0)))
        self._free_s_NR = np.zeros((replicas, rows))
        """The moment from which on a row is free; infinite where it is in use."""
        self._curves = ThresholdCurves(machine, replicas, len(classes), threshold)
        self._prefill = Prefill(machine, replicas)
        self._seconds_N = np.full(replicas, self._times.fixed_s)
        self._reading_s_N = np.full(replicas, self._times.fixed_s)
        self._rate_NC = np.ones(by_class)
        self.block_N: Ints = np.ones(replicas, np.int64)
        self.arrived_NC: Ints = np.zeros(by_class, np.int64)
        self.prompt_tokens_NC = np.zeros(by_class)
        self.ended_NC: Ints = np.zeros(by_class, np.int64)
        self.ended_tokens_NC = np.zeros(by_class)
        self.tokens_NC = np.zeros(by_class)
        """Tokens written, by sequences that run too."""
        self._watched = watched
        """Replicas whose latencies are kept."""
        self.firsts: list[tuple[Ints, Floats]] = []
        """Replicas and times to the first token, of watched replicas, since they were last taken."""
        self.paces: list[tuple[Ints, Floats]] = []
        """Likewise replicas and times per token after the first, of sequences that ended."""

    @property
    def thresholds_NC(self) -> Floats:
        """The threshold of each class on each replica."""
        return self._curves.thresholds_NC

    @property
    def threshold_changes_N(self) -> Ints:
        """Changes of thresholds since the start."""
        return self._curves.changes_N

    @property
    def kv_tokens_N(self) -> Floats:
        """What is attended to on each replica."""
        figures = self._running.figures
        found: Floats = self._by_group(figures[LENGTH] - figures[LEFT]).sum(axis=1)
        return found

    def set_thresholds(self, thresholds_NC: Floats) -> None:
        """Set what each class of each replica needs to accept a token ahead."""
        self._curves.set(thresholds_NC)

    def add(self, replica: Ints, of_class: Ints, arrival: Floats, prompt: Floats, total: Floats) -> NDArray[np.bool_]:
        """Queue requests, which are counted in `in_flight_N`; return which found a place."""
        group = replica * self.held_NC.shape[1] + of_class
        self.arrived_NC += self._by_class(group)
        self.prompt_tokens_NC += self._by_class(group, prompt)
        fits = self.queues.add(group, np.array([arrival, prompt, total]).T)
        if not fits.all():
            np.subtract.at(self.in_flight_N, replica[~fits], 1)
        return fits

    def advance(self, begin_s: float, end_s: float) -> Floats:
        """Work for a tick; return of those who ended when they came, their first token, their end, and their tokens."""
        before_NC = self.tokens_NC.copy()
        self._pace(begin_s, end_s)
        stay, ended = self._decode(end_s)
        running, parts = [stay], [ended]
        while len(open_M := self._open(end_s)):
            stay, ended = self._admit(open_M, end_s)
            running.append(stay)
            parts.append(ended)
        self._running = _Running(*(np.concatenate(each, axis=1) for each in zip(*running, strict=True)))
        self.queues.served(self.tokens_NC - before_NC)
        return np.concatenate(parts, axis=1)

    def _by_class(self, group: Ints, weights: Floats | None = None) -> NDArray[Any]:
        """Return how many there are of each class on each replica, or their sum."""
        return np.bincount(group, weights, self.held_NC.size).reshape(self.held_NC.shape)

    def _by_group(self, weights_S: Floats) -> Floats:
        """Return the sum over the sequences of each class on each replica."""
        found: Floats = self._by_class(self._running.places[0], weights_S).astype(float, copy=False)
        return found

    def _pace(self, begin_s: float, end_s: float) -> None:
        """Find how many steps each replica does in this tick, and how many tokens a row gains per second."""
        tick_s, times, curves = end_s - begin_s, self._times, self._curves
        self._worked = np.maximum(end_s - self._running.figures[CLOCK], 0.0)
        rows_NC = self._by_group(self._worked) / tick_s
        decoding_N = rows_NC.sum(axis=1)
        # A row that is about to decode does so as one, even if it has only part of the tick.
        idle_N = decoding_N == 0
        rows_NC += (idle_N / rows_NC.shape[1])[:, None]
        rows_NC *= np.maximum(1.0, 1 / (decoding_N + idle_N))[:, None]
        rows_N = np.maximum(decoding_N, 1.0)
        other_s_N = times.fixed_s + times.kv_token_s * self.kv_tokens_N
        rows_NC = rows_NC.astype(np.float32)
        tokens_NB = np.einsum("nc,ncb->nb", rows_NC, curves.tokens_NCB)
        seconds_NB = np.einsum("nc,ncb->nb", rows_NC, curves.feeding_s_NCB)
        seconds_NB += other_s_N.astype(np.float32)[:, None]
        seconds_NB[:, 1:] += times.masks_s
        tokens_NB /= seconds_NB
        best_N = tokens_NB.argmax(axis=1)
        self.block_N = best_N + 1
        at_N = np.arange(len(best_N))
        seconds_N = seconds_NB[at_N, best_N]
        self._reading_s_N = other_s_N + (seconds_N - other_s_N) * np.minimum(decoding_N / rows_N, 1.0)
        part_N = self._prefill.share_of_tick(begin_s, end_s)
        plain_N, read_N = (1 - part_N) / seconds_N, part_N / (seconds_N + self._prefill.extra_N)
        self._rate_NC = curves.tokens_NCB[at_N, :, best_N] * (plain_N + read_N)[:, None]
        self._seconds_N = 1 / (plain_N + read_N)

    def _decode(self, end_s: float) -> tuple[_Running, Floats]:
        """Let all sequences gain what their clocks allow; return those that stay, and who ended."""
        running, rate = self._running, self._rate_NC.ravel()[self._running.places[0]]
        clock, left = running.figures[CLOCK], running.figures[LEFT]
        wanted = self._worked * rate
        self.tokens_NC += self._by_group(np.minimum(left, wanted))
        over = (wanted >= left) & (self._worked > 0)
        went = np.flatnonzero(over)
        ends_s = clock[went] + left[went] / rate[went]
        left -= wanted
        np.maximum(left, 0.0, out=left)
        np.maximum(clock, end_s, out=clock)
        ended = self._end(running.some(went), ends_s)
        return running.some(np.flatnonzero(~over)), ended

    def _end(self, gone: _Running, ends_s: Floats) -> Floats:
        """Free the rows of sequences that end; return the rows of `advance`."""
        group, row = gone.places
        ended_NC = self._by_class(group)
        self.held_NC -= ended_NC
        self.ended_NC += ended_NC
        ended_N = ended_NC.sum(axis=1)
        self._held_N -= ended_N
        self.in_flight_N -= ended_N
        self.ended_tokens_NC += self._by_class(group, gone.figures[TOKENS])
        self._free_s_NR.ravel()[row] = ends_s
        replica, tokens = group // self.held_NC.shape[1], gone.figures[TOKENS]
        seen = (replica < self._watched) & (tokens > 1)
        if seen.any():
            self.paces.append((replica[seen], ((ends_s - gone.figures[FIRST])[seen] / (tokens[seen] - 1))))
        return np.array([gone.figures[ARRIVAL], gone.figures[FIRST], ends_s, gone.figures[TOKENS]])

    def _open(self, end_s: float) -> Ints:
        """Return the replicas where somebody waits, a row is free, and a prompt can be read."""
        free_N = self._held_N < self._machine.max_num_seqs
        return np.flatnonzero((self.in_flight_N > self._held_N) & free_N & (self._prefill.until_N < end_s))

    def _admit(self, open_M: Ints, end_s: float) -> tuple[_Running, Floats]:
        """Give a free row to the next on each of these replicas; return those that stay, and who ended at once."""
        group = self.queues.next(open_M)
        arrival, prompt, total = self.queues.pop(group).T
        free_s_MR, row = self._free_s_NR[open_M], open_M * self._machine.max_num_seqs
        row += free_s_MR.argmin(axis=1)
        masks = self.block_N[open_M] - 1
        read_s = self._prefill.read(
            open_M,
            arrival,
            prompt,
            masks * (self.thresholds_NC.ravel()[group] < 1),
            self._free_s_NR.ravel()[row],
            self._held_N[open_M] > 0,
            self._seconds_N[open_M],
            self._reading_s_N[open_M],
            end_s,
        )
        first = np.minimum(total, self._curves.credit_NCB.reshape(-1, self._machine.masks + 1)[group, masks])
        rate, left, worked = self._rate_NC.ravel()[group], total - first, np.maximum(end_s - read_s, 0.0)
        gained = np.minimum(left, worked * rate)
        self.tokens_NC.ravel()[group] += first + gained
        self.held_NC.ravel()[group] += 1
        self._held_N[open_M] += 1
        self._free_s_NR.ravel()[row] = np.inf
        self.queues.served_prompts(group, prompt)
        seen = open_M < self._watched
        if seen.any():
            self.firsts.append((open_M[seen], (read_s - arrival)[seen]))
        figures = np.array([np.maximum(read_s, end_s), left - gained, prompt + total, arrival, read_s, total])
        admitted, over = _Running(np.array([group, row]), figures), (gained >= left) & (worked > 0)
        went = np.flatnonzero(over)
        if not len(went):
            return admitted, np.zeros((4, 0))
        ended = self._end(admitted.some(went), read_s[went] + left[went] / rate[went])
        return admitted.some(np.flatnonzero(~over)), ended
