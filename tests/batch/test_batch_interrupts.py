"""Ctrl-C, also where native code drops what it raises."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from mars_ray.batch.interrupts import Interrupts


@pytest.fixture(autouse=True)
def as_a_program_has_it() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_interrupts_at_once_and_again_at_the_next_look_if_that_was_dropped() -> None:
    with Interrupts() as interrupts:
        interrupts.check()
        dropped = True
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            dropped = False
        assert dropped
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_behind_the_block_everything_is_as_it_was() -> None:
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_another_thread_it_changes_nothing() -> None:
    def handler_within() -> object:
        with Interrupts() as interrupts:
            interrupts.check()
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(handler_within).result() is signal.default_int_handler
