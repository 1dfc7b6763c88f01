"""The engines of a small simulated cluster, step by step.

A step admits requests, reads prompts within the budget of the engine, and lasts as long as its work takes. At its end
each decoding sequence gains a random number of tokens, with the mean that the profile gives for the block and the
threshold. A prompt that has been read gains its first tokens.

Letters: `R` slots, `S` running sequences, `C` classes, `B` blocks, `K` masks, `L` lines of a step time,
`U` random numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np

from mars_ray.engine.scheduling.scheduler import DECODE_TOKENS
from mars_ray.engine.service_class import ServiceClass
from mars_ray.engine.stats.block_choice import CHOOSE_EVERY
from mars_ray.simulate.fleet import PROMPT, Fleet, Floats, Ints
from mars_ray.simulate.machine import Machine

DRAWN = 65536
"""Random numbers that are drawn at once."""
LEVELS = 1024
"""Number of different random numbers."""
NONE: Floats = np.zeros((4, 0))
"""The ended sequences of a step in which none ends."""


@dataclass(slots=True)
class _Prompt:
    """A prompt that is being read."""

    of_class: int
    left: float
    """Tokens that have not been read."""
    request: Floats
    """The columns of `Queues`."""


@dataclass(slots=True)
class _Reading:
    """The prompt tokens of one step."""

    read: list[_Prompt]
    """Prompts that end in this step."""
    tokens: float = 0.0
    """Tokens of long prompts."""
    short: float = 0.0
    """Tokens of short prompts, which an engine decodes together with the other sequences."""
    shorts: int = 0
    """Number of short prompts."""


class _Engine:
    """The sequences of one replica, and the step that it is in."""

    def __init__(self, machine: Machine, classes: int) -> None:
        slots = machine.max_num_seqs
        self.ends_s = math.inf
        """End of the current step; infinite while the engine is idle."""
        self.reading: list[_Prompt] = []
        self.count = 0
        """Number of running sequences S, which are the first columns of the arrays. The last ones have had their
        prompts read in the current step."""
        self.decoding = 0
        """Number of running sequences that decode in the current step."""
        self.running_C = [0] * classes
        """Running sequences by class."""
        self.kv_tokens = 0.0
        """Tokens that the running sequences attend to."""
        self.class_R: Ints = np.zeros(slots, np.int64)
        self.left_R = np.zeros(slots)
        """Tokens to generate."""
        self.length_R = np.zeros(slots)
        """Length of prompt and answer at the end."""
        self.arrival_R = np.zeros(slots)
        self.first_R = np.zeros(slots)
        """Time of the first token."""
        self.total_R = np.zeros(slots)
        """Tokens of the answer."""
        self.block = 1
        self.gained_CU = np.ones((classes, LEVELS))
        """Tokens of a step for each of the random numbers U."""
        self.surplus_C = np.zeros(classes)
        """Tokens that the last step of a sequence would gain beyond its answer."""
        self.feeding_s_LC: list[list[float]] = []
        """Seconds that a sequence adds to a step."""
        self.steps = 0
        self.chosen_for: tuple[int, int] | None = None
        """Number of sequences, by powers of two, and number of threshold changes, when the block was chosen."""

    @property
    def columns(self) -> tuple[Ints | Floats, ...]:
        """All arrays of sequences."""
        return self.class_R, self.left_R, self.length_R, self.arrival_R, self.first_R, self.total_R


class SteppedFleet(Fleet):
    """Engines that are simulated step by step."""

    def __init__(
        self,
        machine: Machine,
        classes: Sequence[ServiceClass],
        replicas: int,
        threshold: float,
        watched: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(machine, classes, replicas, threshold, watched)
        self._lines = machine.lines
        self._engines = [_Engine(machine, len(classes)) for _ in range(replicas)]
        self._random = np.random.default_rng([seed, 3])
        self._drawn: Ints = np.zeros(0, np.int64)

    @property
    def kv_tokens_N(self) -> Floats:
        """Number of tokens that the running sequences of each replica attend to."""
        return np.array([engine.kv_tokens for engine in self._engines])

    def advance(self, begin_s: float, end_s: float) -> Floats:
        """Run a tick. Return arrival, first token and end in seconds, and tokens, of the ended sequences: [4, S]."""
        ended = [NONE]
        for replica in np.flatnonzero(self.in_flight_N).tolist():
            engine = self._engines[replica]
            if engine.ends_s == math.inf:
                self._begin(replica, engine, begin_s)
            while engine.ends_s <= end_s:
                ended.append(self._finish(replica, engine))
                self._begin(replica, engine, engine.ends_s)
        return np.concatenate(ended, axis=1)

    def _begin(self, replica: int, engine: _Engine, now_s: float) -> None:
        """Begin a step, or wait if there is nothing to do."""
        engine.decoding = engine.count
        if not engine.count and not engine.reading:
            now_s = max(now_s, self._next_arrival_s(replica))
            if now_s == math.inf:
                engine.ends_s = math.inf
                return
        reading = self._read(replica, engine, now_s)
        self._choose_block(replica, engine)
        engine.ends_s = now_s + self._seconds(engine, reading)
        for prompt in reading.read:
            arrival_s, length, total = prompt.request.tolist()
            for column, value in zip(
                engine.columns, (prompt.of_class, total, length + total, arrival_s, 0.0, total), strict=True
            ):
                column[engine.count] = value
            engine.count += 1
            engine.running_C[prompt.of_class] += 1

    def _next_arrival_s(self, replica: int) -> float:
        """Return the arrival of the request to serve next; infinite if none waits."""
        if not self.queues.waiting[replica].any():
            return math.inf
        return self.queues.arrival_s(int(self.queues.next(np.array([replica]))[0]))

    def _read(self, replica: int, engine: _Engine, now_s: float) -> _Reading:
        """Read prompts within the budget of a step, and admit requests."""
        budget = float(self._machine.max_prefill_tokens)
        reading = _Reading([])
        waiting = engine.reading
        engine.reading = []
        while budget > 0 and (prompt := waiting.pop(0) if waiting else self._admit(replica, now_s)):
            part = min(prompt.left, budget)
            prompt.left -= part
            budget -= part
            engine.kv_tokens += part
            (engine.reading if prompt.left else reading.read).append(prompt)
            if prompt.request[PROMPT] > DECODE_TOKENS:
                reading.tokens += part
            else:
                reading.short += part
                reading.shorts += 1
        engine.reading += waiting
        return reading

    def _admit(self, replica: int, now_s: float) -> _Prompt | None:
        """Give a slot to the next request, if there is one and a slot is free."""
        held_C = self.held_NC[replica]
        if not self.queues.waiting[replica].any() or held_C.sum() >= self._machine.max_num_seqs:
            return None
        queue = self.queues.next(np.array([replica]))
        if self.queues.arrival_s(int(queue[0])) > now_s:
            return None
        [request] = self.queues.pop(queue)
        of_class = int(queue[0]) % len(held_C)
        held_C[of_class] += 1
        self.queues.served_prompts(queue, request[PROMPT : PROMPT + 1])
        return _Prompt(of_class, float(request[PROMPT]), request)

    def _choose_block(self, replica: int, engine: _Engine) -> None:
        """Choose the block with the most tokens per second, as often as `BlockChoice` does."""
        seqs = engine.count + len(engine.reading)
        chosen_for = (seqs - 1).bit_length() if seqs else 0, int(self._curves.changes_N[replica])
        engine.steps += 1
        if engine.steps % CHOOSE_EVERY and chosen_for == engine.chosen_for:
            return
        engine.chosen_for = chosen_for
        seqs_C = self.held_NC[replica]
        feeding_s_LCB = self._curves.feeding_s_LNCB[:, replica]
        seconds_LB = np.array(
            [
                line.fixed_s + line.kv_token_s * engine.kv_tokens + seqs_C @ feeding_s_CB
                for line, feeding_s_CB in zip(self._lines, feeding_s_LCB, strict=True)
            ]
        )
        seconds_LB[:, 1:] += np.array([[line.masks_s] for line in self._lines])
        tokens_CB = self._curves.tokens_NCB[replica]
        rates_B = seqs_C @ tokens_CB / seconds_LB.max(axis=0)
        engine.block = 1 + int(rates_B.argmax())
        engine.feeding_s_LC = feeding_s_LCB[:, :, engine.block - 1].tolist()
        engine.surplus_C = self._curves.surplus_NCB[replica, :, engine.block - 1]
        # A mask that adds 0.7 tokens on average adds one in 7 of 10 steps. One random number decides on all masks of a
        # sequence, because a token counts only if all before it do.
        gain_CK = np.diff(tokens_CB[:, : engine.block]).clip(0.0)
        levels_U = (np.arange(LEVELS) + 0.5) / LEVELS
        engine.gained_CU = 1.0 + np.floor(gain_CK[:, None, :] + levels_U[:, None]).sum(axis=2)
        self.block_N[replica] = engine.block

    def _seconds(self, engine: _Engine, reading: _Reading) -> float:
        """Return the time of a step. Masks follow each prompt that ends."""
        masks = engine.block - 1
        tokens = reading.tokens + masks * (len(reading.read) - reading.shorts)
        short = reading.short + masks * reading.shorts
        seconds_L: list[float] = [
            line.fixed_s
            + line.kv_token_s * engine.kv_tokens
            + sum(map(mul, feeding_s_C, engine.running_C))
            + line.seq_s * reading.shorts
            + line.position_s * short
            + (line.prompt_s + line.prompt_token_s * tokens if tokens else 0.0)
            + (line.masks_s if masks else 0.0)
            for line, feeding_s_C in zip(self._lines, engine.feeding_s_LC, strict=True)
        ]
        return max(seconds_L)

    def _finish(self, replica: int, engine: _Engine) -> Floats:
        """Give the sequences their tokens; return the ended ones in the form that `advance` returns."""
        count = engine.count
        of_class_S = engine.class_R[:count]
        left_S = engine.left_R[:count]
        several = len(engine.running_C) > 1
        drawn_S = self._draw(count)
        gained_S = engine.gained_CU[of_class_S, drawn_S] if several else engine.gained_CU[0].take(drawn_S)
        if engine.decoding < count:
            self._start(replica, engine, gained_S)
        left_S -= gained_S
        over_S = left_S <= 0
        if over_S.any():
            gained_S[over_S] += left_S[over_S]  # what the last step gains beyond the answer
        gained_C: Floats = (
            np.bincount(of_class_S, gained_S, len(engine.running_C)).astype(float)
            if several
            else np.array([gained_S.sum()])
        )
        self.tokens_NC[replica] += gained_C
        engine.kv_tokens += float(gained_C.sum())
        if several:
            self.queues.served_by(replica, gained_C)
        return self._end(replica, engine, np.flatnonzero(over_S)) if over_S.any() else NONE

    def _start(self, replica: int, engine: _Engine, gained_S: Floats) -> None:
        """Note the first tokens of the sequences whose prompts were read in this step.

        The tokens per forward of a profile are those of whole answers, whose last steps end with a stop token. So the
        surplus of the last step is gained in the first one.
        """
        started = slice(engine.decoding, engine.count)
        surplus_S = engine.surplus_C[engine.class_R[started]]
        gained_S[started] += np.floor(surplus_S + self._draw(len(surplus_S)) / LEVELS)
        engine.first_R[started] = engine.ends_s
        if replica < self._watched:
            waited_S = engine.ends_s - engine.arrival_R[started]
            self.firsts.append((np.full(len(waited_S), replica), waited_S))

    def _end(self, replica: int, engine: _Engine, ending: Ints) -> Floats:
        """Free the slots of sequences that end; return them in the form that `advance` returns."""
        classes = len(engine.running_C)
        of_class_S = engine.class_R[ending]
        ends_S = np.full(len(ending), engine.ends_s)
        requests = np.array([engine.arrival_R[ending], engine.first_R[ending], ends_S, engine.total_R[ending]])
        self._count_ended(replica * classes + of_class_S, requests)
        engine.kv_tokens -= float(engine.length_R[ending].sum())
        engine.running_C = (np.array(engine.running_C) - np.bincount(of_class_S, minlength=classes)).tolist()
        stay = np.delete(np.arange(engine.count), ending)
        for column in engine.columns:
            column[: len(stay)] = column[stay]
        engine.count = len(stay)
        return requests

    def _draw(self, count: int) -> Ints:
        """Return random numbers from 0 to `LEVELS` - 1."""
        if len(self._drawn) < count:
            self._drawn = self._random.integers(LEVELS, size=DRAWN)
        drawn, self._drawn = self._drawn[:count], self._drawn[count:]
        return drawn
