"""The metrics of a run in a store, whose writer may end at any time."""

from collections.abc import Iterator
from uuid import uuid4

import pytest
from upath import UPath

from mars_ray.training.metrics import StepMetrics, open_metrics, read_metrics


@pytest.fixture
def folder() -> Iterator[UPath]:
    place = UPath(f"memory://{uuid4()}")
    yield place
    place.fs.rm(place.path, recursive=True)


def step(number: int) -> StepMetrics:
    return StepMetrics(
        step=number,
        steps=9,
        mask_loss=None,
        ar_loss=1.0,
        learning_rate=0.1,
        grad_norm=1.0,
        tokens_per_s=1.0,
        heldout_tokens_per_forward=None,
        heldout_agreement=None,
    )


def test_lines_before_a_state_outlive_the_writer(folder: UPath) -> None:
    killed = open_metrics(folder, 0)
    for number in (1, 2):
        killed.write(step(number))
    killed.flush()  # as before a state is saved
    killed.write(step(3))
    with open_metrics(folder, 2) as writer:
        writer.write(step(3))
    assert [each.step for each in read_metrics(folder)] == [1, 2, 3]


def test_a_worker_that_was_given_up_writes_over_no_newer_lines(folder: UPath) -> None:
    with pytest.raises(ConnectionError), open_metrics(folder, 0) as given_up:
        given_up.write(step(1))
        with open_metrics(folder, 0) as writer:
            for number in (1, 2):
                writer.write(step(number))
        raise ConnectionError
    assert [each.step for each in read_metrics(folder)] == [1, 2]
