"""Ctrl-C while a job runs."""

import signal
from contextlib import suppress
from pathlib import Path

import pytest

from mars_ray.program import CtrlC

pytestmark = pytest.mark.usefixtures("sigint")


def test_a_ctrl_c_that_other_code_swallowed_is_raised_after_the_next_write() -> None:
    before = signal.getsignal(signal.SIGINT)
    with CtrlC() as ctrl_c:
        with ctrl_c.deferred():
            pass
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), ctrl_c.deferred():
            pass
    assert signal.getsignal(signal.SIGINT) is before


def test_a_ctrl_c_during_a_write_is_raised_when_the_write_has_ended(tmp_path: Path) -> None:
    written = tmp_path / "written"
    with CtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt), ctrl_c.deferred():
        signal.raise_signal(signal.SIGINT)
        written.touch()
    assert written.exists()


def test_a_ctrl_c_outside_a_write_is_raised_at_once() -> None:
    with CtrlC(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
