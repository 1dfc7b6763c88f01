"""How long a step takes, learned while running, and how fast each block is by that.

Steps of many kinds are kept, and not just the last ones: who looks ahead by 8 for an hour and then asks what 1 would
take needs what was measured at 1 before.
"""

from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

STEPS_PER_KIND = 12
"""Steps kept of each kind, the last ones."""
STEPS_KEPT = 16384
"""Older steps count no more: other work on the machine comes and goes."""
FIT_EVERY = 64
"""Steps between two fits."""
FIRST_FIT, FIRST_STEPS = 16, 256
"""The first 256 steps are fitted every 16: each tells much then."""
PAUSE = 20
"""A step that takes so many times as long as usual was a pause of the machine, which is no property of a step."""
CLOCK_S = 1e-7
"""Seconds a step takes at least, however coarse the clock."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step is given to do."""

    num_seqs: int
    """Sequences that decode."""
    positions: int
    """Their positions: tokens, drafts and masks."""
    kv_tokens: int
    """Tokens in the cache that the sequences attend to."""
    prompt_tokens: int = 0
    """Tokens of sequences that read their prompts."""
    masks: int = 0
    """Masks among the positions."""

    @property
    def kind(self) -> tuple[int, int, int, bool]:
        """The kind of the step; steps of one kind differ by less than a factor of two."""
        sizes = self.num_seqs.bit_length(), self.positions.bit_length(), self.prompt_tokens.bit_length()
        return *sizes, self.masks > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step: a fixed part, and parts for each sequence, position, and token."""

    fixed_s: float
    seq_s: float = 0.0
    position_s: float = 0.0
    kv_token_s: float = 0.0
    prompt_s: float = 0.0
    """Added where prompts are read, whatever their length."""
    prompt_token_s: float = 0.0
    masks_s: float = 0.0
    """Added where masks are fed, however many: an adapter is read then, and drafts are corrected."""

    def seconds(self, work: StepWork) -> float:
        """Return how long a step takes."""
        return (
            self.fixed_s
            + self.seq_s * work.num_seqs
            + self.position_s * work.positions
            + self.kv_token_s * work.kv_tokens
            + self.prompt_s * (work.prompt_tokens > 0)
            + self.prompt_token_s * work.prompt_tokens
            + self.masks_s * (work.masks > 0)
        )


class StepTimeFit:
    """Least squares over steps of all kinds; `model` is None before there are enough of them."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int, int, bool], deque[tuple[int, StepWork, float]]] = defaultdict(
            lambda: deque(maxlen=STEPS_PER_KIND)
        )
        self._steps = 0
        self.model: StepTime | None = None

    def observe(self, work: StepWork, seconds: float) -> None:
        """Record one step."""
        self._kinds[work.kind].append((self._steps, work, seconds))
        self._steps += 1
        if self._steps % (FIT_EVERY if self._steps > FIRST_STEPS else FIRST_FIT) == 0:
            kept = [step for kind in self._kinds.values() for step in kind if step[0] >= self._steps - STEPS_KEPT]
            with suppress(RuntimeError):  # the solver gave up; the former fit serves on
                found = fit([work for _, work, _ in kept], np.array([seconds for _, _, seconds in kept]))
                if found.fixed_s + found.seq_s + found.position_s > 0:  # else nothing but prompts was read so far
                    self.model = found


def fit(steps: list[StepWork], seconds_S: NDArray[np.float64]) -> StepTime:
    """Fit the parts of a step time; none is negative, for more work never takes less time."""
    work_S5 = np.array([astuple(work) for work in steps], dtype=float)
    prompt_S, masks_S = work_S5[:, 3], work_S5[:, 4]
    work_S7 = np.column_stack([np.ones(len(steps)), work_S5[:, :3], prompt_S > 0, prompt_S, masks_S > 0])
    seconds_S = seconds_S.clip(min=CLOCK_S)
    scale_7 = work_S7.max(axis=0).clip(min=1)
    work_S7 = work_S7 / scale_7
    # What a step usually takes: errors relative to what was measured, so that others on the same cores, who make steps
    # longer and never shorter, count for little. The first look tells which steps were long pauses.
    kept_S = seconds_S <= PAUSE * _usual(work_S7, seconds_S)[1]
    found_7, usual_S = _usual(work_S7[kept_S], seconds_S[kept_S])
    # The mean, which those others make longer: all parts alike, for who was kept waiting says little of its work.
    found_7 *= (seconds_S[kept_S] / usual_S).mean()
    fixed, seq, position, kv_token, prompt, prompt_token, masks = (found_7 / scale_7).tolist()
    return StepTime(
        fixed_s=fixed,
        seq_s=seq,
        position_s=position,
        kv_token_s=kv_token,
        prompt_s=prompt,
        prompt_token_s=prompt_token,
        masks_s=masks,
    )


def _usual(
    work_S7: NDArray[np.float64], seconds_S: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the parts of the time that steps usually take, [7], and that time, [S]."""
    found_7, _ = nnls(work_S7 / seconds_S[:, None], np.ones(len(seconds_S)))
    return found_7, (work_S7 @ found_7).clip(min=CLOCK_S)


def block_rates(
    model: StepTime, tokens_B: NDArray[np.float64], positions_B: NDArray[np.float64], *, num_seqs: int, kv_tokens: int
) -> NDArray[np.float64]:
    """Return the expected tokens per second with blocks of 1, 2, ... B, [B].

    `tokens_B` and `positions_B` are what all `num_seqs` sequences gain in a step, and their positions, by block.
    """
    seconds_B = model.fixed_s + model.seq_s * num_seqs + model.position_s * positions_B + model.kv_token_s * kv_tokens
    seconds_B[1:] += model.masks_s
    rates_B: NDArray[np.float64] = tokens_B / seconds_B
    return rates_B
