"""The engines of a large simulated cluster, all moved together in ticks: slots, prefill, decoding.

Steps are not simulated one by one, as in `stepped_fleet`. In a tick, a replica makes the steps that its step time
allows, and each sequence gains the expected tokens of these steps. Every sequence has its own clock, so a sequence that
arrives, ends or has its prompt read within a tick loses no time. `Prefill` reads prompts.

A few arrays hold the running sequences of all replicas, so the number of numpy calls per tick does not grow with the
number of sequences.

Letters: `N` replicas, `R` slots, `C` classes, `B` blocks, `S` running sequences, `M` some replicas with one prompt
each, `K` masks, `L` lines of a step time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mars_ray.engine.scheduling.scheduler import DECODE_TOKENS
from mars_ray.engine.service_class import ServiceClass
from mars_ray.simulate.fleet import Fleet, Floats, Ints
from mars_ray.simulate.machine import Machine

CLOCK, LEFT, LENGTH, ARRIVAL, FIRST, TOKENS = range(6)
"""Columns of a sequence: time up to which it has been stepped; tokens left to generate; final length; times of arrival
and first token; tokens of its answer."""


class Prefill:
    """The prompts that each replica reads, and the time that reading them adds to its steps."""

    def __init__(self, machine: Machine, replicas: int) -> None:
        self._budget = float(machine.max_prefill_tokens)
        self._lines = machine.lines
        self.until_N = np.zeros(replicas)
        """Time at which each replica will have read all its prompts."""
        self.extra_N = np.zeros(replicas)
        """Seconds that reading adds to a step."""
        self._step_N = np.zeros(replicas)
        """Time at which the last step that reads prompts starts, by replica."""
        self._room_N = np.zeros(replicas)
        """Prompt tokens that still fit into this last step."""
        self._reading_s_LN = np.zeros((len(self._lines), replicas))
        """Seconds that each line predicts for the steps up to this last one. The steps take the longest of these
        times."""
        self._unpaid_N = np.zeros(replicas)
        """Seconds of reading that were added to a tick after the steps of the tick had been counted."""

    def share_of_tick(self, begin_s: float, end_s: float) -> Floats:
        """Return the share of a tick for which the steps of each replica read prompts."""
        tick_s = end_s - begin_s
        reading_N = (self.until_N - begin_s).clip(0.0, tick_s) + self._unpaid_N
        share_N: Floats = np.minimum(reading_N / tick_s, 1.0)
        self._unpaid_N = reading_N - share_N * tick_s
        return share_N

    def read(
        self,
        replica: Ints,
        arrival: Floats,
        tokens: Floats,
        masks: Ints,
        free_s: Floats,
        busy: NDArray[np.bool_],
        step_s: Floats,
        reading_step_s_LM: Floats,
        end_s: float,
    ) -> Floats:
        """Read one more prompt on each of these replicas, and return the time of each prompt's first token.

        A slot is free from `free_s` on. A step without prompts takes `step_s` seconds. A step with prompts takes the
        longest time over the lines: `reading_step_s_LM` plus the time that the prompt adds to the line.
        """
        # A request that arrives during a step waits for the end of the step, which takes half a step on average. A
        # request that waited for a slot gets it at the end of a step, and does not wait again.
        ready_s = np.where(arrival > free_s, arrival + busy * step_s / 2, free_s)
        until_s = self.until_N[replica]
        last_s = self._step_N[replica]
        room = self._room_N[replica]
        rest = tokens - np.where(ready_s <= last_s, np.minimum(room, tokens), 0.0)
        steps = np.ceil(rest / self._budget)
        own = steps > 0
        at_least_one = np.maximum(steps, 1)
        start_s = np.where(own, np.maximum(until_s, ready_s), until_s)
        long = tokens > DECODE_TOKENS
        before_s_LM = np.where(own, 0.0, self._reading_s_LN[:, replica])
        after_s_LM = before_s_LM + [
            steps * reading_step_s_M + (line.prompt_s * steps + line.prompt_token_s * (tokens + masks)) * long
            for line, reading_step_s_M in zip(self._lines, reading_step_s_LM, strict=True)
        ]
        length_s = after_s_LM.max(axis=0) - before_s_LM.max(axis=0)
        extra_s = length_s - steps * reading_step_s_LM.max(axis=0)
        done_s: Floats = start_s + length_s
        self._reading_s_LN[:, replica] = after_s_LM
        self._room_N[replica] = np.where(own, steps * self._budget - rest, room - tokens)
        self._step_N[replica] = np.where(own, done_s - length_s / at_least_one, last_s)
        self.extra_N[replica] = np.where(own, extra_s / at_least_one, self.extra_N[replica])
        self.until_N[replica] = done_s
        self._unpaid_N[replica] += np.minimum(done_s, end_s) - np.minimum(start_s, end_s)
        return done_s


class _Running(NamedTuple):
    """Some of the running sequences."""

    indices: Ints
    """Indices of the queue (replica * classes + class) and of the slot (replica * slots + slot), as an array [2, S]."""
    figures: Floats
    """The columns `CLOCK`, `LEFT`, `LENGTH`, `ARRIVAL`, `FIRST` and `TOKENS`, as an array [6, S]."""

    def take(self, numbers: Ints) -> "_Running":
        """Return the sequences at these positions."""
        return _Running(self.indices.take(numbers, axis=1), self.figures.take(numbers, axis=1))


class FluidFleet(Fleet):
    """Engines that gain the expected tokens of their steps."""

    def __init__(
        self, machine: Machine, classes: Sequence[ServiceClass], replicas: int, threshold: float, watched: int = 0
    ) -> None:
        super().__init__(machine, classes, replicas, threshold, watched)
        self._lines = machine.lines
        self._held_N: Ints = np.zeros(replicas, np.int64)
        self._running = _Running(np.zeros((2, 0), np.int64), np.zeros((6, 0)))
        self._free_s_NR = np.zeros((replicas, machine.max_num_seqs))
        """Time from which each slot is free; infinite while the slot is in use."""
        self._prefill = Prefill(machine, replicas)
        self._reading_s_LN = np.array([np.full(replicas, line.fixed_s) for line in self._lines])
        self._seconds_N: Floats = self._reading_s_LN.max(axis=0)
        self._rate_NC = np.ones(self.held_NC.shape)

    @property
    def kv_tokens_N(self) -> Floats:
        """Number of tokens that the running sequences of each replica attend to."""
        figures = self._running.figures
        tokens: Floats = self._by_group(figures[LENGTH] - figures[LEFT]).sum(axis=1)
        return tokens

    def advance(self, begin_s: float, end_s: float) -> Floats:
        """Run a tick. Return arrival, first token and end in seconds, and tokens, of the ended sequences: [4, S]."""
        before_NC = self.tokens_NC.copy()
        self._pace(begin_s, end_s)
        stay, ended = self._decode(end_s)
        running = [stay]
        parts = [ended]
        while len(open_M := self._open(end_s)):
            stay, ended = self._admit(open_M, end_s)
            running.append(stay)
            parts.append(ended)
        self._running = _Running(*(np.concatenate(parts_of, axis=1) for parts_of in zip(*running, strict=True)))
        self.queues.served(self.tokens_NC - before_NC)
        return np.concatenate(parts, axis=1)

    def _by_group(self, weights_S: Floats) -> Floats:
        """Return the sum of the weights of the running sequences, for each class on each replica."""
        sums: Floats = self._by_class(self._running.indices[0], weights_S).astype(float, copy=False)
        return sums

    def _pace(self, begin_s: float, end_s: float) -> None:
        """Compute each replica's step time in this tick, and the tokens per second of a sequence of each class."""
        tick_s = end_s - begin_s
        curves = self._curves
        self._worked = np.maximum(end_s - self._running.figures[CLOCK], 0.0)
        seqs_NC = self._by_group(self._worked) / tick_s
        decoding_N = seqs_NC.sum(axis=1)
        # A sequence that decodes for only part of the tick counts as a whole sequence.
        idle_N = decoding_N == 0
        seqs_NC += (idle_N / seqs_NC.shape[1])[:, None]
        seqs_NC *= np.maximum(1.0, 1 / (decoding_N + idle_N))[:, None]
        seqs_N = np.maximum(decoding_N, 1.0)
        kv_tokens_N = self.kv_tokens_N
        seqs_NC = seqs_NC.astype(np.float32)
        tokens_NB = np.einsum("nc,ncb->nb", seqs_NC, curves.tokens_NCB)
        other_s_LN = np.array([line.fixed_s + line.kv_token_s * kv_tokens_N for line in self._lines])
        seconds_LNB = np.array(
            [
                np.einsum("nc,ncb->nb", seqs_NC, feeding_s_NCB) + other_s_N.astype(np.float32)[:, None]
                for feeding_s_NCB, other_s_N in zip(curves.feeding_s_LNCB, other_s_LN, strict=True)
            ]
        )
        for seconds_NB, line in zip(seconds_LNB, self._lines, strict=True):
            seconds_NB[:, 1:] += line.masks_s
        tokens_NB /= seconds_LNB.max(axis=0)
        best_N = tokens_NB.argmax(axis=1)
        self.block_N = best_N + 1
        at_N = np.arange(len(best_N))
        seconds_LN = seconds_LNB[:, at_N, best_N]
        seconds_N = seconds_LN.max(axis=0)
        self._reading_s_LN = other_s_LN + (seconds_LN - other_s_LN) * np.minimum(decoding_N / seqs_N, 1.0)
        part_N = self._prefill.share_of_tick(begin_s, end_s)
        plain_N = (1 - part_N) / seconds_N
        read_N = part_N / (seconds_N + self._prefill.extra_N)
        self._rate_NC = curves.tokens_NCB[at_N, :, best_N] * (plain_N + read_N)[:, None]
        self._seconds_N = 1 / (plain_N + read_N)

    def _decode(self, end_s: float) -> tuple[_Running, Floats]:
        """Add the tokens of this tick to all sequences; return the sequences still running and those that ended."""
        running = self._running
        rate = self._rate_NC.ravel()[running.indices[0]]
        clock = running.figures[CLOCK]
        left = running.figures[LEFT]
        gained = self._worked * rate
        self.tokens_NC += self._by_group(np.minimum(left, gained))
        over = (gained >= left) & (self._worked > 0)
        ending = np.flatnonzero(over)
        ends_s = clock[ending] + left[ending] / rate[ending]
        left -= gained
        np.maximum(left, 0.0, out=left)
        np.maximum(clock, end_s, out=clock)
        ended = self._end(running.take(ending), ends_s)
        return running.take(np.flatnonzero(~over)), ended

    def _end(self, ending: _Running, ends_s: Floats) -> Floats:
        """Free the slots of sequences that end; return their columns in the form that `advance` returns."""
        group, slot = ending.indices
        figures = ending.figures
        requests = np.array([figures[ARRIVAL], figures[FIRST], ends_s, figures[TOKENS]])
        self._count_ended(group, requests)
        self._held_N -= self._by_class(group).sum(axis=1)
        self._free_s_NR.ravel()[slot] = ends_s
        return requests

    def _open(self, end_s: float) -> Ints:
        """Return the replicas with a waiting request, a free slot, and time to read a prompt."""
        free_N = self._held_N < self._machine.max_num_seqs
        return np.flatnonzero((self.in_flight_N > self._held_N) & free_N & (self._prefill.until_N < end_s))

    def _admit(self, open_M: Ints, end_s: float) -> tuple[_Running, Floats]:
        """Give a free slot to the next request of each of these replicas; return running and ended sequences."""
        group = self.queues.next(open_M)
        arrival, prompt, total = self.queues.pop(group).T
        slot = open_M * self._machine.max_num_seqs + self._free_s_NR[open_M].argmin(axis=1)
        masks = self.block_N[open_M] - 1
        read_s = self._prefill.read(
            open_M,
            arrival,
            prompt,
            masks * (self.thresholds_NC.ravel()[group] < 1),
            self._free_s_NR.ravel()[slot],
            self._held_N[open_M] > 0,
            self._seconds_N[open_M],
            self._reading_s_LN[:, open_M],
            end_s,
        )
        first = np.minimum(total, self._curves.tokens_NCB.reshape(-1, self._machine.masks + 1)[group, masks])
        rate = self._rate_NC.ravel()[group]
        left = total - first
        worked = np.maximum(end_s - read_s, 0.0)
        gained = np.minimum(left, worked * rate)
        self.tokens_NC.ravel()[group] += first + gained
        self.held_NC.ravel()[group] += 1
        self._held_N[open_M] += 1
        self._free_s_NR.ravel()[slot] = np.inf
        self.queues.served_prompts(group, prompt)
        watched = open_M < self._watched
        if watched.any():
            self.firsts.append((open_M[watched], (read_s - arrival)[watched]))
        figures = np.array([np.maximum(read_s, end_s), left - gained, prompt + total, arrival, read_s, total])
        admitted = _Running(np.array([group, slot]), figures)
        over = (gained >= left) & (worked > 0)
        ending = np.flatnonzero(over)
        if not len(ending):
            return admitted, np.zeros((4, 0))
        ended = self._end(admitted.take(ending), read_s[ending] + left[ending] / rate[ending])
        return admitted.take(np.flatnonzero(~over)), ended
