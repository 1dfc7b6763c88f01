"""The engines of a simulated cluster, all of them at once: rows, the reading of prompts, decoding.

A step of the engine is not simulated by itself: in a tick a replica does as many as its step time allows, and a row
gains the expected tokens of each. Every row has a clock of its own, up to which it has been worked: who arrives, ends
or has its prompt read in the middle of a tick loses nothing of it. The memory of the cache and shared prefixes are not
modelled. Prompts are read by `prefill`; what thresholds give and cost is in `threshold_curves`.

Letters: `N` replicas, `R` rows, `C` classes, `B` blocks, `M` some replicas, one row of each.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mars_ray.engine.service_class import ServiceClass
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.prefill import Prefill
from mars_ray.simulate.queues import ARRIVAL, PROMPT, TOTAL, Floats, Ints, Queues
from mars_ray.simulate.threshold_curves import ThresholdCurves

Ended = tuple[Ints, Ints, Floats, Floats, Floats, Floats]
"""Requests that ended: replica, class, arrival, first token, end, tokens."""


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
        self.in_flight_N: Ints = np.zeros(replicas, np.int64)
        """Requests in flight, for the router, which counts before it queues."""
        self._busy_NR = np.zeros((replicas, rows), bool)
        self._ones_R = np.ones(rows)
        self._class_NR: Ints = np.zeros((replicas, rows), np.int64)
        self._clock_NR = np.zeros((replicas, rows))
        """The moment up to which a row was worked: from then on it decodes, or is free."""
        self._left_NR = np.zeros((replicas, rows))
        self._total_NR = np.zeros((replicas, rows))
        self._prompt_NR = np.zeros((replicas, rows))
        self._arrival_NR = np.zeros((replicas, rows))
        self._first_NR = np.zeros((replicas, rows))
        self._length_N = np.zeros(replicas)
        """Tokens of all running sequences once they end."""
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
        self.step_sums_W22 = np.zeros((watched, 2, 2))
        """Steps and seconds, of each sequence, without and with prompts read."""
        self.firsts: list[tuple[Ints, Floats]] = []
        """Replicas and times to the first token, of watched replicas, since they were last taken."""

    @property
    def thresholds_NC(self) -> Floats:
        """The threshold of each class on each replica."""
        return self._curves.thresholds_NC

    @property
    def threshold_changes_N(self) -> Ints:
        """Changes of thresholds since the start."""
        return self._curves.changes_N

    def set_thresholds(self, thresholds_NC: Floats) -> None:
        """Set what each class of each replica needs to accept a token ahead."""
        self._curves.set(thresholds_NC)

    def add(self, replica: Ints, of_class: Ints, arrival: Floats, prompt: Floats, total: Floats) -> NDArray[np.bool_]:
        """Queue requests, which are counted in `in_flight_N`; return which found a place."""
        requests = np.column_stack([arrival, prompt, total])
        self.arrived_NC += self._by_class(replica, of_class)
        self.prompt_tokens_NC += self._by_class(replica, of_class, prompt)
        fits = self.queues.add(replica, of_class, requests)
        if not fits.all():
            np.subtract.at(self.in_flight_N, replica[~fits], 1)
        return fits

    def advance(self, begin_s: float, end_s: float) -> Ended:
        """Work for a tick; return who ended."""
        self._pace(begin_s, end_s)
        before_NC = self.tokens_NC.copy()
        ended = [self._decode(end_s)]
        while len(admitted := self._admit(end_s)):
            ended.append(self._decode_these(admitted, end_s))
        self.queues.served(self.tokens_NC - before_NC)
        return tuple(np.concatenate(parts) for parts in zip(*ended, strict=True))  # type: ignore[return-value]

    def kv_tokens(self, replica: int) -> float:
        """Return what is attended to on one replica."""
        return float(self._length_N[replica] - self._left_NR[replica].sum())

    def _by_class(self, replica: Ints, of_class: Ints, weights: Floats | None = None) -> NDArray[Any]:
        """Return how many there are of each class on each replica, or their sum."""
        replicas, classes = self.held_NC.shape
        return np.bincount(replica * classes + of_class, weights, replicas * classes).reshape(replicas, classes)

    def _by_group(self, weights: Floats) -> Floats:
        """Return the sum over busy rows of each class on each replica."""
        return (
            np.bincount(self._group, weights, self.held_NC.size).reshape(self.held_NC.shape).astype(float, copy=False)
        )

    def _pace(self, begin_s: float, end_s: float) -> None:
        """Find how many steps each replica does in this tick, and how many tokens a row gains per second."""
        tick_s, times = end_s - begin_s, self._times
        self._busy: Ints = np.flatnonzero(self._busy_NR)  # most rows of a large fleet are free at most times
        self._group = (
            self._busy // self._machine.max_num_seqs * self.held_NC.shape[1] + self._class_NR.ravel()[self._busy]
        )
        self._worked = np.maximum(end_s - self._clock_NR.ravel()[self._busy], 0.0)
        rows_NC = self._by_group(self._worked) / tick_s
        decoding_N = rows_NC.sum(axis=1)
        # A row that is about to decode does so as one, even if it has only part of the tick.
        rows_NC = np.where(decoding_N[:, None] > 0, rows_NC, 1 / rows_NC.shape[1])
        rows_N = rows_NC.sum(axis=1)
        rows_NC = rows_NC * np.maximum(1.0, 1 / rows_N)[:, None]
        rows_N = np.maximum(rows_N, 1.0)
        kv_s_N = times.kv_token_s * (self._length_N - self._left_NR @ self._ones_R)
        tokens_NB = rows_N[:, None] + np.einsum("nc,ncb->nb", rows_NC, self._curves.ahead_NCB)
        feeding_NB = times.position_s * np.einsum("nc,ncb->nb", rows_NC, self._curves.positions_NCB)
        feeding_NB += (times.seq_s * rows_N)[:, None]
        seconds_NB = feeding_NB + (times.fixed_s + kv_s_N)[:, None]
        best_N = (tokens_NB / seconds_NB).argmax(axis=1)
        self.block_N = best_N + 1
        at_N = np.arange(len(best_N))
        seconds_N, feeding_N = seconds_NB[at_N, best_N], feeding_NB[at_N, best_N]
        self._reading_s_N = times.fixed_s + kv_s_N + feeding_N * np.minimum(decoding_N / rows_N, 1.0)
        part_N = self._prefill.share_of_tick(begin_s, end_s)
        plain_N, read_N = (1 - part_N) / seconds_N, part_N / (seconds_N + self._prefill.extra_N)
        self._rate_NC = (1 + self._curves.ahead_NCB[at_N, :, best_N]) * (plain_N + read_N)[:, None]
        self._seconds_N = 1 / (plain_N + read_N)
        if self._watched:
            some = slice(self._watched)
            weight_W = decoding_N[some] * tick_s
            self.step_sums_W22[:, 0, 0] += weight_W * plain_N[some]
            self.step_sums_W22[:, 0, 1] += weight_W * (1 - part_N[some])
            self.step_sums_W22[:, 1, 0] += weight_W * read_N[some]
            self.step_sums_W22[:, 1, 1] += weight_W * part_N[some]

    def _decode(self, end_s: float) -> Ended:
        """Let all rows gain what their clocks allow."""
        busy, rate = self._busy, self._rate_NC.ravel()[self._group]
        clock, before = self._clock_NR.ravel()[busy], self._left_NR.ravel()[busy]
        left = before - self._worked * rate
        over = (left <= 0) & (clock < end_s)
        ends_s = clock[over] + before[over] / rate[over]
        left = np.maximum(left, 0.0)
        self.tokens_NC += self._by_group(before - left)
        self._left_NR.ravel()[busy] = left
        self._clock_NR.ravel()[busy] = np.maximum(clock, end_s)
        return self._end(busy[over], ends_s)

    def _decode_these(self, where: Ints, end_s: float) -> Ended:
        """Let rows that were just filled gain what their clocks allow."""
        clock = self._clock_NR.ravel()[where]
        where, clock = where[clock < end_s], clock[clock < end_s]
        replica, of_class = where // self._machine.max_num_seqs, self._class_NR.ravel()[where]
        rate, left = self._rate_NC[replica, of_class], self._left_NR.ravel()[where]
        gained = np.minimum(left, (end_s - clock) * rate)
        self._left_NR.ravel()[where] = left - gained
        self._clock_NR.ravel()[where] = end_s
        self.tokens_NC += self._by_class(replica, of_class, gained)
        over = gained >= left
        return self._end(where[over], clock[over] + left[over] / rate[over])

    def _end(self, where: Ints, ends_s: Floats) -> Ended:
        replica, of_class = where // self._machine.max_num_seqs, self._class_NR.ravel()[where]
        total = self._total_NR.ravel()[where]
        self._free(where, replica, of_class, ends_s)
        ended_NC = self._by_class(replica, of_class)
        self.in_flight_N -= ended_NC.sum(axis=1)
        self.ended_NC += ended_NC
        self.ended_tokens_NC += self._by_class(replica, of_class, total)
        return replica, of_class, self._arrival_NR.ravel()[where], self._first_NR.ravel()[where], ends_s, total

    def _free(self, where: Ints, replica: Ints, of_class: Ints, at_s: Floats) -> None:
        self._busy_NR.ravel()[where] = False
        self._left_NR.ravel()[where] = 0.0
        self._clock_NR.ravel()[where] = at_s
        self.held_NC -= self._by_class(replica, of_class)
        lengths = self._prompt_NR.ravel()[where] + self._total_NR.ravel()[where]
        self._length_N -= np.bincount(replica, lengths, len(self._length_N))

    def _admit(self, end_s: float) -> Ints:
        """Give a free row to the next on each replica, where prompts can be read; return the rows."""
        waiting_NC, alone = self.queues.waiting, self.held_NC.shape[1] == 1
        waits = (waiting_NC[:, 0] if alone else waiting_NC.sum(axis=1)) > 0
        held_N = self.held_NC[:, 0] if alone else self.held_NC.sum(axis=1)
        open_M = np.flatnonzero(waits & (held_N < self._machine.max_num_seqs) & (self._prefill.until_N < end_s))
        if not len(open_M):
            return open_M
        of_class = self.queues.next(open_M)
        request = self.queues.pop(open_M, of_class)
        free_s = np.where(self._busy_NR[open_M], np.inf, self._clock_NR[open_M])
        row = free_s.argmin(axis=1)
        where: Ints = open_M * self._machine.max_num_seqs + row
        block = self.block_N[open_M]
        masks = (block - 1) * (self.thresholds_NC[open_M, of_class] < 1)
        read_s = self._prefill.read(
            open_M,
            request,
            masks,
            free_s[np.arange(len(row)), row],
            held_N[open_M] > 0,
            self._seconds_N[open_M],
            self._reading_s_N[open_M],
            end_s,
        )
        credit = self._curves.credit_NCB[open_M, of_class, block - 1]
        gained = np.minimum(request[:, TOTAL], credit)
        self._busy_NR.ravel()[where] = True
        self._class_NR.ravel()[where] = of_class
        self._clock_NR.ravel()[where] = read_s
        self._left_NR.ravel()[where] = request[:, TOTAL] - gained
        self._total_NR.ravel()[where] = request[:, TOTAL]
        self._prompt_NR.ravel()[where] = request[:, PROMPT]
        self._arrival_NR.ravel()[where] = request[:, ARRIVAL]
        self._first_NR.ravel()[where] = read_s
        self._length_N[open_M] += request[:, PROMPT] + request[:, TOTAL]
        self.held_NC[open_M, of_class] += 1
        self.tokens_NC[open_M, of_class] += gained
        self.queues.served(self._by_class(open_M, of_class, request[:, PROMPT]))
        seen = open_M < self._watched
        if seen.any():
            self.firsts.append((open_M[seen], (read_s - request[:, ARRIVAL])[seen]))
        return where
