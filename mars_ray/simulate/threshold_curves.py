"""What the thresholds in force give and cost on each simulated replica, by block.

Letters: `N` replicas, `C` classes, `B` blocks, `K` masks.
"""

import numpy as np

from mars_ray.engine.stats.lookahead import Lookahead
from mars_ray.engine.stats.step_time import StepTime
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.queues import Floats, Ints


class ThresholdCurves:
    """The thresholds of each class on each replica, and what follows from them."""

    def __init__(self, machine: Machine, replicas: int, classes: int, threshold: float) -> None:
        self._machine, blocks = machine, machine.masks + 1
        self.thresholds_NC = np.full((replicas, classes), np.nan)
        # These two are read whole in every tick: in half the memory that takes less time, and is exact enough.
        self.tokens_NCB = np.ones((replicas, classes, blocks), np.float32)
        """Expected tokens of a sequence in a step."""
        self.feeding_s_NCB = np.ones((replicas, classes, blocks), np.float32)
        """Seconds by which a sequence makes a step longer, with the positions it feeds, without what it attends to."""
        self.credit_NCB = np.ones((replicas, classes, blocks))
        """Tokens of a sequence that its first step stands for: the last step gives more than are wanted."""
        self.changes_N: Ints = np.zeros(replicas, np.int64)
        """Changes of thresholds of each replica since the start."""
        self._by_threshold: dict[float, tuple[Floats, Floats, Floats]] = {}
        self.set(np.full((replicas, classes), threshold))
        self.changes_N[:] = 0

    def set(self, thresholds_NC: Floats) -> None:
        """Set what each class of each replica needs to accept a token ahead."""
        changed = thresholds_NC != self.thresholds_NC
        if not changed.any():
            return
        for value in np.unique(thresholds_NC[changed]).tolist():
            if value not in self._by_threshold:
                self._by_threshold[value] = _curves(self._machine.lookahead(value), self._machine.times())
            where = changed & (thresholds_NC == value)
            self.tokens_NCB[where], self.feeding_s_NCB[where], self.credit_NCB[where] = self._by_threshold[value]
        self.changes_N += changed.sum(axis=1)
        self.thresholds_NC = thresholds_NC.copy()


def _curves(lookahead: Lookahead, times: StepTime) -> tuple[Floats, Floats, Floats]:
    """Return by block the tokens expected, the seconds of a sequence, and the tokens that the first step stands for.

    A sequence of n tokens takes (n + o) / m steps on average, where each gives m, and o is what the last one is
    expected to give beyond n: E[X (X - 1)] / 2m. So n - (m - o) are left for the steps behind the first.
    """
    tokens_B = lookahead.tokens_B
    survival_K = np.diff(tokens_B).clip(0.0)
    beyond_B = np.concatenate([[0.0], (np.arange(1, len(survival_K) + 1) * survival_K).cumsum()]) / tokens_B
    feeding_s_B = times.seq_s + times.position_s * lookahead.positions_B
    return tokens_B, feeding_s_B, np.maximum(1.0, tokens_B - beyond_B)
