"""How long a step takes, learned while running, and the block for which it gives most tokens per second.

In:    positions, attended tokens and seconds of each step.
Out:   `t = a + b * positions + c * kv_tokens`; the best block for given sequences.
Never: knows a sequence.
"""

from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

STEPS_KEPT = 256
FIT_EVERY = 32
FIRST_FIT = 16
CLOCK_S = 1e-7
"""No step is shorter, however coarse the clock."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: a fixed part, a part per position fed, a part per token attended to."""

    fixed_s: float
    position_s: float
    kv_token_s: float


class StepTimeFit:
    """Least squares over the most recent steps; `model` is None before there are enough of them."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=STEPS_KEPT)
        self._new = 0
        self.model: StepTime | None = None

    def observe(self, positions: int, kv_tokens: int, seconds: float) -> None:
        """Record one step."""
        self._steps.append((positions, kv_tokens, seconds))
        self._new += 1
        if self._new >= (FIT_EVERY if self.model else FIRST_FIT):
            self._new = 0
            with suppress(RuntimeError):  # the solver gave up; the former fit serves on
                self.model = fit(np.array(self._steps))


def fit(steps_S3: NDArray[np.float64]) -> StepTime:
    """Fit positions, kv_tokens, seconds. No part comes out negative: more work never takes less time."""
    work_S3 = np.column_stack([np.ones(len(steps_S3)), steps_S3[:, :2]])
    seconds_S = steps_S3[:, 2].clip(min=CLOCK_S)
    # Relative errors: a slow step must not outweigh many fast ones. A pause of the machine is no property of a step.
    usual_S = seconds_S <= 3 * np.median(seconds_S)
    work_S3, seconds_S = work_S3[usual_S], seconds_S[usual_S]
    scale_3 = work_S3.max(axis=0).clip(min=1)
    found_3, _ = nnls(work_S3 / scale_3 / seconds_S[:, None], np.ones(len(seconds_S)))
    return StepTime(*(found_3 / scale_3).tolist())


def best_block(model: StepTime, gained_K: NDArray[np.float64], *, rows: int, drafting: int, kv_tokens: int) -> int:
    """Return the block, 1..K + 1, with the most expected tokens per second.

    `gained_K` is how many tokens each mask is expected to give in one step, summed over the `drafting` ones of `rows`
    sequences. Every token is fed once more, as a token, beside the masks of the next step.
    """
    masks_B = np.arange(len(gained_K) + 1)
    tokens_B = rows + np.concatenate([[0.0], gained_K.cumsum()])
    positions_B = tokens_B + drafting * masks_B
    seconds_B = model.fixed_s + model.position_s * positions_B + model.kv_token_s * kv_tokens
    return 1 + int(np.argmax(tokens_B / seconds_B))
