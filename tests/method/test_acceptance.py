"""Confidence and accepted lengths against loops and definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.method.acceptance import accepted_lengths, confidence
from mars_ray.method.metric import Metric, accepts_nothing

confidences = st.lists(st.floats(0, 1), min_size=1, max_size=8)


def accepted_by_hand(row: list[float], threshold: float, metric: Metric) -> int:
    length = 1
    if accepts_nothing(threshold, metric):
        return length
    for value in row[1:]:
        if (value > threshold) if metric is Metric.ENTROPY else (value < threshold):
            break
        length += 1
    return length


@given(row=confidences, threshold=st.floats(0, 1), metric=st.sampled_from(Metric))
def test_the_accepted_length_is_that_of_a_walk_from_the_left(
    row: list[float], threshold: float, metric: Metric
) -> None:
    kept = accepted_lengths(
        torch.tensor([row], dtype=torch.float64), torch.tensor([threshold], dtype=torch.float64), metric
    )
    assert kept.tolist() == [accepted_by_hand(row, threshold, metric)]


@given(row=confidences, low=st.floats(0, 1), high=st.floats(0, 1))
def test_a_lower_threshold_never_accepts_less(row: list[float], low: float, high: float) -> None:
    low, high = sorted((low, high))
    both = torch.tensor([row, row], dtype=torch.float64)
    at_low, at_high = accepted_lengths(
        both, torch.tensor([low, high], dtype=torch.float64), Metric.PROBABILITY
    ).tolist()
    assert at_low >= at_high


@pytest.mark.parametrize(
    ("threshold", "metric"), [(1.0, Metric.PROBABILITY), (1.0, Metric.MARGIN), (0.0, Metric.ENTROPY)]
)
def test_the_autoregressive_threshold_keeps_one_token_even_of_certain_masks(threshold: float, metric: Metric) -> None:
    certain = torch.full((1, 5), 0.0 if metric is Metric.ENTROPY else 1.0)
    assert accepted_lengths(certain, torch.tensor([threshold]), metric).tolist() == [1]


def test_each_row_has_its_own_threshold() -> None:
    rows = torch.tensor([[0.9, 0.8, 0.7]] * 3)
    assert accepted_lengths(rows, torch.tensor([0.95, 0.75, 0.5]), Metric.PROBABILITY).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (Metric.PROBABILITY, 0.7),
        (Metric.MARGIN, 0.7 - 0.2),
        (Metric.ENTROPY, -sum(p * math.log(p) for p in (0.7, 0.2, 0.1))),
    ],
)
def test_the_metrics_are_what_their_names_say(metric: Metric, expected: float) -> None:
    logits = torch.tensor([0.7, 0.2, 0.1]).log() + 3.0
    assert confidence(logits, metric).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("metric", Metric)
def test_a_banned_token_leaves_every_metric_finite(metric: Metric) -> None:
    assert math.isfinite(confidence(torch.tensor([1.0, -torch.inf, 0.5]), metric).item())
