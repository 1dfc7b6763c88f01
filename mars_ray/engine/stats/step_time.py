"""Predict the time of a step from its work, with a linear model fitted to measured steps.

Some measurements of each kind of step are kept, so that after an hour of steps with a block of 8 the model can still
predict the time of a step with a block of 1. They are taken some steps apart: other processes slow a machine down for
seconds, and consecutive steps would make the kind that runs at that time look slower than the others.

Times are not quite linear: a step waits for the weights, and its first positions are computed during the wait. So a
second model is fitted to recent steps of one size. Drafts and masks add little up to a number of positions, and each
further one adds more.
"""

from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mars_ray.machines.step_model import StepModel

STEPS_PER_KIND = 48
"""Number of steps that are kept for each kind. With 12 the cost of a mask varied by a seventh from fit to fit."""
STEPS_APART = 4
"""Minimum number of steps between two that are kept for a kind, once it has enough."""
STEPS_KEPT = 16384
"""Number of steps, counted back from the latest, that a fit may use. Older steps are left out, because the load of the
machine changes."""
FIT_EVERY = 64
"""Number of steps between two fits."""
FIRST_FIT, FIRST_STEPS = 16, 256
"""Fit the model every 16 steps during the first 256 steps."""
PAUSE = 20
"""A step that takes more than this many times the usual time counts as a pause of the machine and is left out."""
INTERRUPTED = 1.4
"""A step that takes more than this many times its fitted time was interrupted and tells nothing of drafts and masks.
Kinds of steps that are rare have too few times for interruptions to average out."""
STEPS_OF_SIZE = 6
"""Minimum number of recent steps with drafts or masks, and of steps of the same size without, from which their cost is
estimated."""
CHEAP = (*range(9), *range(10, 17, 2), *range(20, 33, 4), *range(48, 129, 16))
"""Numbers of positions that are tried as those that take less time."""
AS_GOOD = 1.02
"""Factor by which the error of a fit may exceed the smallest one, if fewer positions are cheap in it."""
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

    def modelled_s(self, model: StepModel) -> float:
        """Return the time of the step on a modelled machine."""
        return model.seconds(
            num_seqs=self.num_seqs,
            positions=self.positions,
            kv_tokens=self.kv_tokens,
            prompt_tokens=self.prompt_tokens,
        )

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadTime:
    """Time that drafts and masks add to a step."""

    plain: float = 1.0
    """Time of steps without drafts and masks, as a multiple of what the linear model predicts."""
    position_s: float
    """Seconds of each draft and mask after the first `cheap` ones of a step."""
    cheap: int = 0
    """Number of drafts and masks of a step that are computed while it waits for the weights."""
    cheap_s: float = 0.0
    """Seconds that each of them takes all the same."""
    masks_s: float = 0.0
    """Seconds added once if the step has masks."""

    @classmethod
    def linear(cls, model: StepTime) -> Self:
        """Return the times of the linear model."""
        return cls(position_s=model.position_s, masks_s=model.masks_s)

    def seconds(self, model: StepTime, num_seqs: int, kv_tokens: int, ahead: float, *, masks: bool) -> float:
        """Return the time of a step with `ahead` drafts and masks."""
        plain_s = self.plain * model.seconds(StepWork(num_seqs, num_seqs, kv_tokens))
        ahead_s = self.cheap_s * min(ahead, self.cheap) + self.position_s * max(0.0, ahead - self.cheap)
        return plain_s + ahead_s + self.masks_s * masks


class StepTimeFit:
    """Fits a `StepTime` to the steps it observes."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int, int, bool], deque[tuple[int, StepWork, float]]] = defaultdict(
            lambda: deque(maxlen=STEPS_PER_KIND)
        )
        self._steps = 0
        self._fitted: list[tuple[StepWork, float]] = []
        """The steps of the latest fit, with their times."""
        self._ahead: dict[int, AheadTime] = {}
        """Fitted `AheadTime`, by the bit length of the number of sequences."""
        self._looked_ahead = False
        """Whether at least `STEPS_OF_SIZE` fitted decoding steps have drafts or masks."""
        self.model: StepTime | None = None
        """Latest fit; None before the first fit."""

    def ahead(self, num_seqs: int) -> AheadTime | None:
        """Return what drafts and masks add to a step of `num_seqs` sequences; None while too few steps show it."""
        if self.model is None or not self._looked_ahead:
            return None
        size = num_seqs.bit_length()
        if size not in self._ahead:
            steps = [step for step in self._fitted if step[0].num_seqs.bit_length() == size]
            self._ahead[size] = fit_ahead(self.model, [step for step in steps if not step[0].prompt_tokens])
        return self._ahead[size]

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
        kept = self._kinds[work.kind]
        if len(kept) < STEPS_PER_KIND or self._steps - kept[-1][0] >= STEPS_APART:
            kept.append((self._steps, work, seconds))
        self._steps += 1
        if self._steps % (FIT_EVERY if self._steps > FIRST_STEPS else FIRST_FIT) == 0:
            recent = [step for kind in self._kinds.values() for step in kind if step[0] >= self._steps - STEPS_KEPT]
            with suppress(RuntimeError):  # keep the previous fit if the solver does not converge
                model = fit([work for _, work, _ in recent], np.array([seconds for _, _, seconds in recent]))
                if model.fixed_s + model.seq_s + model.position_s > 0:  # 0 if all steps so far have only read prompts
                    self.model = model
                    self._fitted = [(work, seconds) for _, work, seconds in recent]
                    self._ahead = {}
                    ahead = sum(work.ahead > 0 and not work.prompt_tokens for work, _ in self._fitted)
                    self._looked_ahead = ahead >= STEPS_OF_SIZE


def fit(steps: list[StepWork], seconds_S: NDArray[np.float64]) -> StepTime:
    """Fit a `StepTime` to steps and their times [S] in seconds, by non-negative least squares."""
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


def fit_ahead(model: StepTime, steps: list[tuple[StepWork, float]]) -> AheadTime:
    """Fit an `AheadTime` to steps of one size and their times. Too few steps give the times of the linear model."""
    steps = [(work, seconds) for work, seconds in steps if seconds <= PAUSE * max(CLOCK_S, model.seconds(work))]
    fitted = _fit_ahead(model, steps)

    def interrupted(work: StepWork, seconds: float) -> bool:
        usual_s = fitted.seconds(model, work.num_seqs, work.kv_tokens, work.ahead, masks=work.masks > 0)
        return seconds > INTERRUPTED * max(CLOCK_S, usual_s)

    usual = [step for step in steps if not interrupted(*step)]
    return fitted if len(usual) == len(steps) else _fit_ahead(model, usual)


def _fit_ahead(model: StepTime, steps: list[tuple[StepWork, float]]) -> AheadTime:
    """Fit an `AheadTime` to all of `steps`."""
    ahead_S = np.array([work.ahead for work, _ in steps])
    if min((ahead_S == 0).sum(), (ahead_S > 0).sum()) < STEPS_OF_SIZE:
        return AheadTime.linear(model)
    seconds_S = np.array([seconds for _, seconds in steps]).clip(min=CLOCK_S)
    plain_S = np.array([model.seconds(StepWork(work.num_seqs, work.num_seqs, work.kv_tokens)) for work, _ in steps])
    masks_S = np.array([work.masks > 0 for work, _ in steps])
    fits = []
    for cheap in (cheap for cheap in CHEAP if cheap < ahead_S.max()):
        work_S4 = np.column_stack([plain_S, ahead_S, (ahead_S - cheap).clip(0), masks_S])
        with suppress(RuntimeError):  # the solver may not converge
            parts_4, usual_S = _usual(work_S4, seconds_S)
            plain, cheap_s, more_s, masks_s = parts_4.tolist()
            fitted = AheadTime(plain=plain, position_s=cheap_s + more_s, cheap=cheap, cheap_s=cheap_s, masks_s=masks_s)
            fits.append((float(np.abs(usual_S / seconds_S - 1).mean()), fitted))
    if not fits:
        return AheadTime.linear(model)
    least = min(error for error, _ in fits)
    return next(fitted for error, fitted in fits if error <= AS_GOOD * least)


def _usual(
    work_ST: NDArray[np.float64], seconds_S: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the terms [T] and the predictions [S] of a fit that minimises relative errors.

    Relative errors give little weight to steps that other processes slowed down.
    """
    from scipy.optimize import nnls  # takes half a second, and gateways, decoders and controllers do not need it

    parts_T, _ = nnls(work_ST / seconds_S[:, None], np.ones(len(seconds_S)))
    return parts_T, (work_ST @ parts_T).clip(min=CLOCK_S)


def block_rates(
    model: StepTime,
    ahead: AheadTime,
    tokens_B: NDArray[np.float64],
    positions_B: NDArray[np.float64],
    *,
    num_seqs: int,
    kv_tokens: int,
) -> NDArray[np.float64]:
    """Return the expected tokens per second with blocks of 1, 2, ..., B as an array [B].

    `tokens_B` and `positions_B` are the tokens gained and the positions of all `num_seqs` sequences in a step.
    """
    seconds_B = [
        ahead.seconds(model, num_seqs, kv_tokens, positions - num_seqs, masks=block > 0)
        for block, positions in enumerate(positions_B.tolist())
    ]
    rates_B: NDArray[np.float64] = tokens_B / np.array(seconds_B).clip(min=CLOCK_S)
    return rates_B
