"""The requests of a benchmark are the same ones every time."""

import pytest

from benchmarks.decode.workload import Workload, bundled_workload
from mars_ray.data.tasks import FAMILIES
from mars_ray.errors import ConfigError
from mars_ray.model.checkpoint import Checkpoint


def test_the_same_seed_gives_the_same_requests_and_another_gives_others(
    bundled: Checkpoint, workload: Workload
) -> None:
    assert bundled_workload(bundled, 12, seed=0) == workload
    assert bundled_workload(bundled, 12, seed=1).prompts != workload.prompts


def test_twelve_requests_are_one_of_each_family_and_no_two_are_alike(workload: Workload) -> None:
    trained = [family for family in FAMILIES.values() if family.weight]
    assert len(trained) == len(workload.prompts) == len(set(workload.prompts)) == 12


def test_lengths_are_those_of_answers(workload: Workload) -> None:
    assert all(1 < length <= 128 for length in workload.lengths)
    assert workload.tokens == sum(workload.lengths)


@pytest.mark.parametrize("requests", [0, 261])
def test_more_requests_than_prompts_are_refused(bundled: Checkpoint, requests: int) -> None:
    with pytest.raises(ConfigError, match=f"requests is {requests}; it must be in 1..260"):
        bundled_workload(bundled, requests, seed=0)
