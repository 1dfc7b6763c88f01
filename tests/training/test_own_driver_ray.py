"""Training from a program that has called `ray.init` itself."""

import threading

import pytest
import ray

import mars_ray
from mars_ray.training.metrics import StepMetrics
from tests.training.train_samples import MakeConfig

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.mark.slow
def test_training_joins_the_cluster_of_its_program_from_any_thread(make_config: MakeConfig) -> None:
    node, found = ray.get_runtime_context().get_node_id(), list[StepMetrics]()
    thread = threading.Thread(target=lambda: found.append(mars_ray.train(make_config())))
    thread.start()
    thread.join()
    [last] = found
    assert last.step == last.steps
    assert ray.get_runtime_context().get_node_id() == node
