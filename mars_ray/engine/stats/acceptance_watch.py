"""Watch the acceptance of a decoder of masks: warn and switch its masks off if it collapses, and try them again later.

Each step with masks predicts the token after its autoregressive one, at the first mask. The next forward verifies this
prediction, whatever load and price are, even if the token was too unlikely to be drafted. The acceptance is the share
of right predictions. Below threshold 1 only audits of tokens accepted at the first mask count, because verification
sees no likely token there.

In:    Verified predictions with their probabilities, and the number of tokens generated while masks are off.
Out:   Whether masks are off or on trial, and the measured and the expected acceptance.
Never: Masks that keep about what their card or their own probabilities promise raise an alarm.
"""

import logging
from collections import deque
from statistics import fmean

from mars_ray.engine.stats.state import SourceAcceptance

log = logging.getLogger(__name__)

WINDOW = 200
"""Number of the latest predictions that are compared with the expected acceptance."""

COLLAPSED = 0.5
"""Share of the expected acceptance below which masks are switched off."""

DEAD = 0.1
"""Share of the expected acceptance below which masks are switched off before the window is full. Where masks gain
nothing the engine feeds few, so that 200 predictions take long."""

SLACK = 2
"""Number of right predictions below these bounds that may be chance."""

HARDEST = 0.25
"""Minimum expected acceptance as a share of the card's. Text may be harder than that of the calibration, so unlikely
predictions lower the expectation. Predictions that are all unlikely are a collapse, too."""

TRIAL = 50
"""Number of predictions that decide whether masks stay on again, and the least number that switches them off."""

FIRST_REST_TOKENS = 2048
"""Tokens generated without masks before the first trial. Each trial that fails doubles the number."""

LONGEST_REST_TOKENS = 2**20

TRIAL_TOKENS = 8192
"""Tokens of a trial without enough predictions, after which masks rest again. Draws below threshold 1 verify none."""


class AcceptanceWatch:
    """Acceptance of one source of drafts, which is named `source` in reports."""

    def __init__(self, source: str, tokens_per_forward: float | None) -> None:
        """Expect the acceptance that gives the calibrated `tokens_per_forward` at threshold 1; None if unknown.

        If each prediction is right with probability p, a forward gains 1 + p + p² + ... = 1 / (1 - p) tokens.
        """
        self._source = source
        calibrated = None if tokens_per_forward is None else 1 - 1 / max(1.0, tokens_per_forward)
        self._least, self._most = (0.0, 1.0) if calibrated is None else (HARDEST * calibrated, calibrated)
        self._predictions: deque[tuple[float, bool]] = deque(maxlen=WINDOW)
        """Probability of each of the latest predictions, and whether it was right."""
        self._right = 0
        """Number of right predictions among them."""
        self._alarm: SourceAcceptance | None = None
        """Acceptance at the collapse or in the last trial; None without an alarm."""
        self._rest_tokens = FIRST_REST_TOKENS
        self._rest_left = 0
        """Number of tokens until the next trial."""
        self._tried = 0
        """Number of tokens since a trial began."""

    @property
    def off(self) -> bool:
        """Whether masks are switched off until the next trial."""
        return self._rest_left > 0

    @property
    def on_trial(self) -> bool:
        """Whether masks are tried again after a collapse."""
        return self._alarm is not None and not self.off

    def state(self) -> SourceAcceptance | None:
        """Return the acceptance of the latest predictions, or the one that raised the alarm; None before any."""
        return self._alarm or (self._measured() if self._predictions else None)

    def generated(self, tokens: int) -> None:
        """Count tokens of sequences of this source. After enough of them a trial begins, or ends without an outcome."""
        if self.off:
            self._rest_left = max(0, self._rest_left - tokens)
            self._tried = 0
        elif self.on_trial:
            self._tried += tokens
            if self._tried >= TRIAL_TOKENS:
                self._rest()

    def observe(self, probability: float, right: bool) -> bool:
        """Record a verified prediction. Return whether it switched masks off, or on for good."""
        if self.off:
            return False  # from a request whose answer must not depend on the load, so that it keeps its masks
        if len(self._predictions) == WINDOW:
            self._right -= self._predictions[0][1]
        self._predictions.append((probability, right))
        self._right += right
        if len(self._predictions) < TRIAL:
            return False
        share = COLLAPSED if self._alarm or len(self._predictions) == WINDOW else DEAD
        # The mean over the window is computed only if few predictions were right.
        collapsed = self._is_below(share * self._most) and self._is_below(share * self._measured().expected)
        recovered = self._alarm is not None and not collapsed
        if collapsed:
            self._switch_off()
        elif recovered:
            log.warning("%s are on again: %s.", self._source, self._measured().figures)
            self._alarm, self._rest_tokens = None, FIRST_REST_TOKENS
        return collapsed or recovered

    def _switch_off(self) -> None:
        alarm = self._measured(alarm=1)
        if self._alarm is None:
            log.warning(
                "%s are off: %s. They are tried again after %d tokens. Look for a wrong adapter or card, or for text "
                "unlike that of the training.",
                self._source,
                alarm.figures,
                self._rest_tokens,
            )
        self._alarm = alarm
        self._rest()

    def _rest(self) -> None:
        self._rest_left = self._rest_tokens
        self._rest_tokens = min(2 * self._rest_tokens, LONGEST_REST_TOKENS)
        self._predictions.clear()
        self._right = 0

    def _is_below(self, acceptance: float) -> bool:
        return self._right + SLACK < acceptance * len(self._predictions)

    def _measured(self, alarm: int = 0) -> SourceAcceptance:
        likely = fmean(probability for probability, _ in self._predictions)
        expected = min(self._most, max(self._least, likely))
        return SourceAcceptance(self._source, self._right / len(self._predictions), expected, alarm)
