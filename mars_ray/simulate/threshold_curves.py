"""The tokens and the costs of each class on each replica of a simulated cluster, at its current threshold.

Letters: `N` replicas, `C` classes, `B` blocks, `K` masks, `L` lines of a step time.
"""

from collections.abc import Sequence

import numpy as np

from mars_ray.engine.stats.profile import Lookahead
from mars_ray.engine.stats.step_time import StepTime
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.queues import Floats, Ints


class ThresholdCurves:
    """The thresholds of each class on each replica, with their tokens and costs by block."""

    def __init__(self, machine: Machine, replicas: int, classes: int, threshold: float) -> None:
        self._machine = machine
        blocks = machine.masks + 1
        self.thresholds_NC = np.full((replicas, classes), np.nan)
        # Each tick reads these two arrays in full; float32 makes that faster and is precise enough.
        self.tokens_NCB = np.ones((replicas, classes, blocks), np.float32)
        """Expected tokens of a sequence per step."""
        self.feeding_s_LNCB = np.ones((len(machine.lines), replicas, classes, blocks), np.float32)
        """Seconds that the positions of a sequence add to a step, without their attention to earlier tokens."""
        self.surplus_NCB = np.zeros((replicas, classes, blocks))
        """Expected tokens by which the last step of a sequence would exceed its answer, if the tokens of steps were
        drawn without regard to it."""
        self.changes_N: Ints = np.zeros(replicas, np.int64)
        """Number of threshold changes on each replica since the start."""
        self._by_threshold: dict[float, tuple[Floats, Floats, Floats]] = {}
        self.set(np.full((replicas, classes), threshold))
        self.changes_N[:] = 0

    def set(self, thresholds_NC: Floats) -> None:
        """Set the threshold of each class on each replica."""
        changed = thresholds_NC != self.thresholds_NC
        if not changed.any():
            return
        for value in np.unique(thresholds_NC[changed]).tolist():
            if value not in self._by_threshold:
                self._by_threshold[value] = _curves(self._machine.lookahead(value), self._machine.lines)
            where = changed & (thresholds_NC == value)
            self.tokens_NCB[where], feeding_s_LB, self.surplus_NCB[where] = self._by_threshold[value]
            self.feeding_s_LNCB[:, where] = feeding_s_LB[:, None]
        self.changes_N += changed.sum(axis=1)
        self.thresholds_NC = thresholds_NC.copy()


def _curves(lookahead: Lookahead, lines: Sequence[StepTime]) -> tuple[Floats, Floats, Floats]:
    """Return, by block, the expected tokens of a sequence, its seconds as [L, B], and the surplus of its last step.

    A sequence of n tokens that gains X tokens in each step takes (n + s) / m steps on average. Here m is the mean of X,
    and s = E[X (X - 1)] / 2m is the surplus.
    """
    tokens_B = lookahead.tokens_B
    gain_K = np.diff(tokens_B).clip(0.0)
    surplus_B = np.concatenate([[0.0], (np.arange(1, len(gain_K) + 1) * gain_K).cumsum()]) / tokens_B
    feeding_s_LB = np.array([line.seq_s + line.position_s * lookahead.positions_B for line in lines])
    return tokens_B, feeding_s_LB, surplus_B
