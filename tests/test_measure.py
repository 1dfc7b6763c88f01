"""Who runs when, what counts, and what the summaries say."""

from collections.abc import Callable
from typing import Any

import pytest

from mars_ray.measure import Sample, Spread, _cpu_model, interleaved, machine, speedup, spread, throughput
from mars_ray.progress import ProgressLine


def sample(seconds: float) -> Sample:
    return Sample(tokens=12, seconds=seconds, forwards=4)


def test_candidates_take_turns_beginning_with_another_each_round_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def candidate(name: str) -> Callable[[], Sample]:
        def run() -> Sample:
            order.append(name)
            return sample(len(order))

        return run

    with ProgressLine("bench", total=None) as progress:
        samples = interleaved({name: candidate(name) for name in "abc"}, 2, progress)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert {name: [int(each.seconds) for each in of] for name, of in samples.items()} == {
        "a": [6, 8],
        "b": [4, 9],
        "c": [5, 7],
    }


def test_a_speedup_is_the_median_of_the_ratios_of_each_round() -> None:
    # The machine was three times as slow in the second round; the ratio is 2 in all of them.
    baseline, faster = [sample(2), sample(6), sample(4)], [sample(1), sample(3), sample(2)]
    assert speedup(faster, baseline) == Spread(2, 2, 2)
    assert throughput(faster) == Spread(6, 4, 12)


def test_a_spread_is_median_and_range() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)


def test_a_sample_knows_its_rates() -> None:
    assert sample(2).tokens_per_s == pytest.approx(6)


def test_the_machine_is_described_without_names_or_paths() -> None:
    described: dict[str, Any] = machine()
    assert described["cores"] >= 1 and described["memory_gib"] > 0 and described["torch_threads"] >= 1
    assert not any("/" in value for value in described.values() if isinstance(value, str))


def test_the_processor_is_the_first_model_name() -> None:
    assert _cpu_model("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Other\n") == "Some CPU @ 2 GHz"
    assert _cpu_model("") != ""
