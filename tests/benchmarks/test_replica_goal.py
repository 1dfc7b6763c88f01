"""In the simulator, replicas that follow the goal do not follow bursts up and down."""

import pytest

from benchmarks.replica_goal import GOAL, KEPT, WARM_S, Run, capacity, run
from mars_ray.simulate.modelled_machine import open_machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("load", ["bursts of 60 s", "bursts of 240 s"])
def test_bursts_keep_the_promise_with_the_replicas_of_the_best_constant_and_without_oscillation(load: str) -> None:
    modelled = open_machine("l4/qwen2.5-7b")
    asked = Run(
        load=load, name=GOAL, replicas=None, policy="capacity", ttft_ms=500, seconds=2 * WARM_S, seed=1
    )  # another seed than that of the published figures
    outcome = run(modelled, capacity(modelled), asked)
    assert outcome.in_time >= KEPT
    assert outcome.replicas <= 3.3
    assert outcome.changes_per_hour <= 6
