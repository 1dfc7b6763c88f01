"""Make a simulated machine from a modelled step, and open machines by name or file.

The tokens and the accuracy of a threshold come from the calibration of a card, or from the paper. The paper publishes
tokens without verification. Our engine verifies drafts too, so the profile needs assumptions: a token at a mask is
right as often as its confidence says, rounded down to the next published threshold; nothing below 0.5 is drafted; and
the forward that finds a wrong draft looks no further ahead.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.optimize import brentq

from mars_ray.engine.stats.lookahead import look_ahead
from mars_ray.engine.stats.profile import Profile, ProfilePoint
from mars_ray.engine.stats.step_time import StepTime, StepWork, fit
from mars_ray.errors import ConfigError
from mars_ray.machines.registry import step_model
from mars_ray.machines.step_model import PAPER_BLOCK, PAPER_CURVE, PAPER_SOURCE, StepModel
from mars_ray.model.card import Card, gains, read_card
from mars_ray.simulate.machine import Machine, read_machine

MAX_NUM_SEQS = 256
"""Number of sequences decoded together; the default of an engine on a GPU."""
MAX_WAITING_SEQS = 1024
MAX_PREFILL_TOKENS = 2048
"""Number of prompt tokens read per step; the smallest default of vLLM on GPUs."""
CACHE_TOKENS_PER_SEQ = 1024
"""Number of tokens for which the cache must have room per sequence, because simulations do not model cache memory."""
FITTED_TOKENS_PER_SEQ = (128, 512, 2048)
"""Numbers of cached tokens per sequence in the steps to which the linear model is fitted."""
FITTED_PROMPTS = (0, 256, MAX_PREFILL_TOKENS)
"""Numbers of prompt tokens in the steps to which the linear model is fitted."""
LEAST_FIXED_S = 1e-9
"""Lowest time without work, because a line of 0 would not be valid."""


def open_machine(name: str | None, card: Path | None = None) -> Machine:
    """Return the machine with a name such as h200/qwen2.5-7b, or read it from a file; None means the bundled
    measurements.

    `card` is a model folder whose calibration replaces the paper's curve. Raises `ConfigError`.
    """
    if name is None or _is_measured(name):
        if card is not None:
            raise ConfigError(f"card is {card}; a measured machine has a calibration of its own. Leave out card.")
        return read_machine(None if name is None else Path(name))
    return modelled_machine(step_model(name), _calibrated(card))


def modelled_machine(model: StepModel, card: Card | None = None) -> Machine:
    """Return the simulated machine of a step model, with the calibration of a card, or with the paper's curve if there
    is no card."""
    profile, accuracy = _paper_profile() if card is None else _card_profile(card)
    max_num_seqs = min(MAX_NUM_SEQS, max(1, model.max_kv_tokens // CACHE_TOKENS_PER_SEQ))
    return Machine(
        max_num_seqs=max_num_seqs,
        max_waiting_seqs=MAX_WAITING_SEQS,
        max_prefill_tokens=MAX_PREFILL_TOKENS,
        max_model_len=min(model.network.max_model_len, model.max_kv_tokens),
        step_time=fitted_step_time(model, max_num_seqs),
        roofline=roofline(model),
        profile=profile,
        accuracy=accuracy,
        measured_on={
            "modelled_step_time": model.name,
            "dollars_per_hour": model.gpu.dollars_per_hour,
            "curve": PAPER_SOURCE if card is None else "the card's calibration",
        },
    )


def roofline(model: StepModel) -> tuple[StepTime, ...]:
    """Return linear models of reading, computing and the processor's work. A step takes the longest of the times."""
    reading = StepTime(fixed_s=model.weights_s + model.overhead_s, seq_s=model.seq_s, kv_token_s=model.kv_token_s)
    computing = StepTime(
        fixed_s=max(model.overhead_s, LEAST_FIXED_S),
        seq_s=model.seq_s,
        position_s=model.position_s,
        prompt_token_s=model.position_s,
    )
    host = StepTime(fixed_s=max(model.host_s, LEAST_FIXED_S), seq_s=model.host_seq_s)
    return reading, computing, host


def fitted_step_time(model: StepModel, max_num_seqs: int) -> StepTime:
    """Return the linear model that an engine would fit to steps of this model."""
    steps = list(visited_steps(max_num_seqs))
    return fit(steps, np.array([step.modelled_s(model) for step in steps]))


def visited_steps(max_num_seqs: int) -> Iterator[StepWork]:
    """Yield the steps that the linear model is fitted to: 1 to `max_num_seqs` sequences, with and without lookahead."""
    counts = [2**power for power in range(max_num_seqs.bit_length()) if 2**power < max_num_seqs] + [max_num_seqs]
    for num_seqs in counts:
        for positions_per_seq in (1, PAPER_BLOCK, 2 * PAPER_BLOCK - 1):
            for tokens_per_seq in FITTED_TOKENS_PER_SEQ:
                for prompt_tokens in FITTED_PROMPTS:
                    yield StepWork(
                        num_seqs=num_seqs,
                        positions=num_seqs * positions_per_seq,
                        kv_tokens=num_seqs * tokens_per_seq,
                        prompt_tokens=prompt_tokens,
                    )


def _is_measured(name: str) -> bool:
    """Return True for a JSON file, unless it is a machine file, which has the key "gpu"."""
    if not name.endswith(".json"):
        return False
    try:
        content = json.loads(Path(name).read_bytes())
    except (OSError, ValueError):
        return True
    return not (isinstance(content, dict) and "gpu" in content)


def _calibrated(folder: Path | None) -> Card | None:
    if folder is None:
        return None
    card = read_card(folder)
    if card is None or not card.block or not any(point.accuracy is not None for point in card.calibration):
        raise ConfigError(
            f"card is {folder}; its mars.json must have a calibration with accuracies. Run mars-ray calibrate."
        )
    return card


def _card_profile(card: Card) -> tuple[tuple[ProfilePoint, ...], tuple[tuple[float, float], ...]]:
    """Return the profile with which an engine starts if it has this card, and the accuracy at each threshold."""
    points = sorted(card.calibration, key=lambda point: -point.threshold)
    agreement = {point.threshold: point.agreement for point in points}
    started = Profile(card.block or 1, gains(points))
    profile = tuple(
        ProfilePoint(point.threshold, point.tokens, point.positions, agreement.get(point.threshold))
        for point in started.points()
    )
    return profile, tuple((point.threshold, point.accuracy) for point in points if point.accuracy is not None)


def _paper_profile() -> tuple[tuple[ProfilePoint, ...], tuple[tuple[float, float], ...]]:
    """Return the profile that follows from the paper's curve and the module's assumptions, and the accuracy at each
    threshold."""
    masks_K = np.arange(1, PAPER_BLOCK)
    # Probability that the confidence of a token at a mask reaches the threshold. No confidence reaches 1.
    passed = [_passed(point.tokens_per_forward) for point in PAPER_CURVE]
    # Probability that a token is right and its confidence lies between a threshold and the next higher one.
    right = [
        (after - before) * point.threshold
        for (before, after), point in zip(pairwise(passed), PAPER_CURVE[1:], strict=True)
    ]
    profile = []
    for number, point in enumerate(PAPER_CURVE):
        first_right = sum(right[number:])
        accepted_K = np.power(passed[number], masks_K, dtype=np.float64)
        drafted_K = np.power(passed[-1], masks_K, dtype=np.float64) - accepted_K
        # A draft counts only if it is right and all before it holds: first accepted masks, then right drafts.
        accepted_then_right_K = np.convolve(passed[number] ** (masks_K - 1), sum(right) ** (masks_K - 1))
        right_K = first_right * accepted_then_right_K[: len(masks_K)]
        forwards = 1 + _surprises(passed[number], passed[-1], first_right, sum(right))
        ahead = look_ahead(accepted_K / forwards, drafted_K / forwards, right_K / forwards)
        wrong = 1 - sum(right[:number]) / passed[number] if number else 0.0
        agreement = 1 - wrong * float(accepted_K.sum()) / forwards / float(ahead.tokens_B[-1])
        profile.append(
            ProfilePoint(point.threshold, tuple(ahead.tokens_B.tolist()), tuple(ahead.positions_B.tolist()), agreement)
        )
    return tuple(profile), tuple((point.threshold, point.accuracy) for point in PAPER_CURVE)


def _surprises(accepted: float, proposed: float, first_right: float, later_right: float) -> float:
    """Return the share of forwards with masks in which a wrong token is drafted.

    `accepted` and `proposed` are the probabilities that a mask is accepted, and that it is accepted or drafted.
    `first_right` and `later_right` are the probabilities that a mask is drafted and right, for the first draft and for
    later drafts.
    """
    after = 1.0  # probability that the drafts of the masks after the first draft are right
    none_wrong = 0.0
    for mask in range(PAPER_BLOCK - 1, 0, -1):
        none_wrong += accepted ** (mask - 1) * (1 - proposed + first_right * after)
        after = 1 - proposed + later_right * after
    return 1 - none_wrong - accepted ** (PAPER_BLOCK - 1)


def _passed(tokens_per_forward: float) -> float:
    """Return the probability of accepting a mask after accepted masks that yields this number of tokens per forward."""
    masks_K = np.arange(1, PAPER_BLOCK)
    return float(brentq(lambda part: float((part**masks_K).sum()) - (tokens_per_forward - 1), 0.0, 1.0))
