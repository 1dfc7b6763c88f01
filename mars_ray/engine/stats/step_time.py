"""Predict the time of a step from its work, with a linear model fitted to measured steps.

The latest measurements of each kind of step are kept, so that after an hour of steps with a block of 8 the model can
still predict the time of a step with a block of 1.

Times are not quite linear: a tile of rows costs as much for one row as for all, and positions are free while a step
waits for weights. So the choice between masks and none corrects predictions by the median error of recent steps of that
size with masks, and of those without, and the time of a position is that of recent steps of that size.
"""

from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

STEPS_PER_KIND = 12
"""Number of the latest steps that are kept for each kind."""
STEPS_KEPT = 16384
"""Number of steps, counted back from the latest, that a fit may use. Older steps are left out, because the load of the
machine changes."""
FIT_EVERY = 64
"""Number of steps between two fits."""
FIRST_FIT, FIRST_STEPS = 16, 256
"""Fit the model every 16 steps during the first 256 steps."""
PAUSE = 20
"""A step that takes more than this many times the usual time counts as a pause of the machine and is left out."""
STEPS_OF_BIAS = 6
"""Minimum number of recent steps from which an error is estimated."""
LONGER = 2
"""Factor by which a step may exceed the bound of its time, because attention takes longer as contexts grow."""
CLOCK_S = 1e-7
"""Minimum time of a step in seconds, because a coarse clock may measure 0."""


class StepWork(NamedTuple):
    """The work of one step."""

    num_seqs: int
    """Sequences that decode."""
    positions: int
    """Tokens, drafts and masks of the decoding sequences."""
    kv_tokens: int
    """Tokens in the cache that all sequences attend to."""
    prompt_tokens: int = 0
    """Prompt tokens read by other sequences."""
    masks: int = 0
    """Masks among the positions."""

    @property
    def ahead(self) -> int:
        """Drafts and masks among the positions."""
        return self.positions - self.num_seqs

    @property
    def kind(self) -> tuple[int, int, int, bool]:
        """Key shared by similar steps, whose sizes differ by less than a factor of two."""
        sizes = self.num_seqs.bit_length(), self.ahead.bit_length(), self.prompt_tokens.bit_length()
        return *sizes, self.masks > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A linear model of the time of a step."""

    fixed_s: float
    seq_s: float = 0.0
    position_s: float = 0.0
    kv_token_s: float = 0.0
    prompt_s: float = 0.0
    """Added once if the step reads a prompt."""
    prompt_token_s: float = 0.0
    masks_s: float = 0.0
    """Seconds added once if the step has masks, for reading the adapter and correcting its drafts."""

    def seconds(self, work: StepWork) -> float:
        """Return the predicted time of a step."""
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
    """Fits a `StepTime` to the steps it observes."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int, int, bool], deque[tuple[int, StepWork, float]]] = defaultdict(
            lambda: deque(maxlen=STEPS_PER_KIND)
        )
        self._steps = 0
        self._biases: dict[tuple[int, bool], float] = {}
        self._position_times: dict[int, float] = {}
        self._looked_ahead = False
        """Whether the fitted steps tell the time of a position from that of a sequence."""
        self.model: StepTime | None = None
        """Latest fit; None before the first fit."""

    def bias(self, num_seqs: int, *, masks: bool) -> float:
        """Return the median of measured over predicted times of decoding steps of a similar size, or 1 if unknown."""
        return self._biases.get((num_seqs.bit_length(), masks), 1.0)

    def position_s(self, num_seqs: int) -> float | None:
        """Return the seconds that one more draft or mask adds to a step of `num_seqs` sequences; None if unknown."""
        if self.model is None or not self._looked_ahead:
            return None
        return self._position_times.get(num_seqs.bit_length(), self.model.position_s)

    def longest_s(self, positions: int) -> float | None:
        """Return a bound for the seconds of a step with up to `positions` positions; None before the first step.

        A position never costs more in a larger step than in a smaller one, so each measured step gives a bound. Steps
        of a kind that has not been measured, such as those that read a long prompt, are bounded by the others.
        """
        measured = [
            (median(seconds for _, _, seconds in kind), min(work.positions + work.prompt_tokens for _, work, _ in kind))
            for kind in self._kinds.values()
        ]
        if not measured:
            return None
        longest_s = max(seconds for seconds, _ in measured)
        return LONGER * max(longest_s, min(seconds * max(1, positions / size) for seconds, size in measured))

    def observe(self, work: StepWork, seconds: float) -> None:
        """Record the work and the time of one step."""
        self._kinds[work.kind].append((self._steps, work, seconds))
        self._steps += 1
        if self._steps % (FIT_EVERY if self._steps > FIRST_STEPS else FIRST_FIT) == 0:
            kept = [step for kind in self._kinds.values() for step in kind if step[0] >= self._steps - STEPS_KEPT]
            with suppress(RuntimeError):  # keep the previous fit if the solver does not converge
                model = fit([work for _, work, _ in kept], np.array([seconds for _, _, seconds in kept]))
                if model.fixed_s + model.seq_s + model.position_s > 0:  # 0 if all steps so far have only read prompts
                    self.model = model
                    steps = [(work, seconds) for _, work, seconds in kept]
                    self._biases = _biases(model, steps)
                    self._position_times = _position_times(model, steps)
                    self._looked_ahead = any(work.ahead for work, _ in steps)


def fit(steps: list[StepWork], seconds_S: NDArray[np.float64]) -> StepTime:
    """Fit a `StepTime` by non-negative least squares."""
    work_S5 = np.array(steps, dtype=float)
    prompt_S, masks_S = work_S5[:, 3], work_S5[:, 4]
    work_S7 = np.column_stack([np.ones(len(steps)), work_S5[:, :3], prompt_S > 0, prompt_S, masks_S > 0])
    seconds_S = seconds_S.clip(min=CLOCK_S)
    scale_7 = work_S7.max(axis=0).clip(min=1)
    work_S7 = work_S7 / scale_7
    # The first fit finds the pauses, and the second fit leaves them out.
    kept_S = seconds_S <= PAUSE * _usual(work_S7, seconds_S)[1]
    parts_7, usual_S = _usual(work_S7[kept_S], seconds_S[kept_S])
    # Rescale to the mean time, which includes interference by other processes. All terms are scaled alike, because
    # interference does not depend on the work of a step.
    parts_7 *= (seconds_S[kept_S] / usual_S).mean()
    fixed, seq, position, kv_token, prompt, prompt_token, masks = (parts_7 / scale_7).tolist()
    return StepTime(
        fixed_s=fixed,
        seq_s=seq,
        position_s=position,
        kv_token_s=kv_token,
        prompt_s=prompt,
        prompt_token_s=prompt_token,
        masks_s=masks,
    )


def _biases(model: StepTime, steps: list[tuple[StepWork, float]]) -> dict[tuple[int, bool], float]:
    """Return the median of measured over predicted times, by the size of the batch and whether there were masks."""
    errors = defaultdict(list)
    for work, seconds in steps:
        if work.num_seqs and not work.prompt_tokens:
            errors[work.num_seqs.bit_length(), work.masks > 0].append(seconds / max(model.seconds(work), CLOCK_S))
    return {size: median(ratios) for size, ratios in errors.items() if len(ratios) >= STEPS_OF_BIAS}


def _position_times(model: StepTime, steps: list[tuple[StepWork, float]]) -> dict[int, float]:
    """Return the median of what a draft or mask added to the time of a step, by the size of the batch."""
    plain = defaultdict(list)
    for work, seconds in steps:
        if work.num_seqs and not work.prompt_tokens and not work.ahead:
            plain[work.num_seqs.bit_length()].append(seconds / max(model.seconds(work), CLOCK_S))
    added = defaultdict(list)
    for work, seconds in steps:
        size = work.num_seqs.bit_length()
        if work.ahead and not work.prompt_tokens and len(plain[size]) >= STEPS_OF_BIAS:
            without_s = median(plain[size]) * model.seconds(work._replace(positions=work.num_seqs))
            added[size].append((seconds - without_s) / work.ahead)
    return {size: max(0.0, median(times)) for size, times in added.items() if len(times) >= STEPS_OF_BIAS}


def _usual(
    work_S7: NDArray[np.float64], seconds_S: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the terms [7] and the predictions [S] of a fit that minimises relative errors.

    Relative errors give little weight to steps that other processes slowed down.
    """
    from scipy.optimize import nnls  # takes half a second, and gateways, decoders and controllers do not need it

    parts_7, _ = nnls(work_S7 / seconds_S[:, None], np.ones(len(seconds_S)))
    return parts_7, (work_S7 @ parts_7).clip(min=CLOCK_S)


def block_rates(
    model: StepTime,
    tokens_B: NDArray[np.float64],
    positions_B: NDArray[np.float64],
    *,
    num_seqs: int,
    kv_tokens: int,
    biases: tuple[float, float] = (1.0, 1.0),
) -> NDArray[np.float64]:
    """Return the expected tokens per second with blocks of 1, 2, ..., B as an array [B].

    `tokens_B` and `positions_B` are the tokens gained and the positions of all `num_seqs` sequences in a step.
    Predicted times are multiplied by `biases`, without and with masks.
    """
    seconds_B = model.fixed_s + model.seq_s * num_seqs + model.position_s * positions_B + model.kv_token_s * kv_tokens
    seconds_B[1:] += model.masks_s
    seconds_B[0] *= biases[0]
    seconds_B[1:] *= biases[1]
    rates_B: NDArray[np.float64] = tokens_B / seconds_B
    return rates_B
