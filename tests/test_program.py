"""How a program ends: one line and a code that says why, whichever signal stopped it, wherever it was."""

import os
import signal
import subprocess
import sys

import pytest

WAIT = "print('ready', flush=True); time.sleep(60)"
WORKER_PRIORITY = (
    "nice = ray.get(ray.remote(lambda: os.nice(0)).remote()) - os.nice(0)\nprint('nicer by', nice, file=sys.stderr)"
)


def start(body: str, *, ignoring: tuple[signal.Signals, ...] = ()) -> "subprocess.Popen[str]":
    lines = ["import os, signal, sys, time", "from mars_ray.errors import ConfigError, InterruptedRunError"]
    lines += ["from mars_ray.program import run_program", "def main():", *(f"    {each}" for each in body.splitlines())]

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background of a shell
        for number in ignoring:
            signal.signal(number, signal.SIG_IGN)

    return subprocess.Popen(
        [sys.executable, "-c", "\n".join([*lines, "run_program('name', main)"])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ignore,
    )


def end(process: "subprocess.Popen[str]", *signals: signal.Signals) -> tuple[int, str]:
    """Send signals to a program that said it is ready; return its code and what it said on standard error."""
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in signals:
            os.kill(process.pid, number)
        _, said = process.communicate()
    return process.returncode, said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_either_signal_ends_a_program_in_one_line_with_its_code(number: signal.Signals, code: int) -> None:
    assert end(start(WAIT), number) == (code, "name: Stopped.\n")


def test_what_a_program_says_when_it_is_stopped_is_said_for_sigterm_too() -> None:
    body = f"try: {WAIT}\nexcept KeyboardInterrupt: raise InterruptedRunError('saved.') from None"
    assert end(start(body), signal.SIGTERM) == (143, "name: saved.\n")


def test_a_sigterm_that_comes_twice_at_once_does_not_cut_off_what_is_saved() -> None:
    body = f"try: {WAIT}\nexcept KeyboardInterrupt:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(0)"
    body += "\n    raise InterruptedRunError('saved.') from None"
    assert end(start(body), signal.SIGTERM, signal.SIGTERM) == (143, "name: saved.\n")


def test_sigterm_ends_a_program_that_a_shell_started_in_the_background() -> None:
    assert end(start(WAIT, ignoring=(signal.SIGINT,)), signal.SIGTERM) == (143, "name: Stopped.\n")


def test_a_program_that_typer_ended_for_a_signal_says_so() -> None:
    body = f"try: {WAIT}\nexcept KeyboardInterrupt: sys.exit(130)"
    assert end(start(body), signal.SIGTERM) == (143, "name: Stopped.\n")


def test_an_error_of_a_user_is_one_line_and_its_code() -> None:
    assert end(start("print('ready')\nraise ConfigError('no.')")) == (2, "name: no.\n")


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_that_ends_by_itself_keeps_its_code(code: int) -> None:
    assert end(start(f"print('ready')\nsys.exit({code})")) == (code, "")


@pytest.fixture(scope="module")
def on_a_local_cluster() -> tuple[int, str]:
    """The end of a program that connected, said how nice its workers are, and was sent SIGTERM."""
    body = f"import ray\nfrom mars_ray.ray_cluster import connect\nconnect()\n{WORKER_PRIORITY}\n{WAIT}"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_worker_niceness", raising=False)
        program = start(body)
    return end(program, signal.SIGTERM)


@pytest.mark.ray
def test_sigterm_is_ours_after_ray_started(on_a_local_cluster: tuple[int, str]) -> None:
    code, said = on_a_local_cluster
    assert (code, said.splitlines()[-1]) == (143, "name: Stopped.")
    assert "SIGTERM" not in said


@pytest.mark.ray
def test_workers_of_a_local_cluster_have_the_priority_of_other_programs(on_a_local_cluster: tuple[int, str]) -> None:
    _, said = on_a_local_cluster
    assert "nicer by 0" in said.splitlines()


@pytest.mark.ray
def test_sigterm_while_ray_starts_ends_in_one_line() -> None:
    body = "import ray, threading\nfrom mars_ray.ray_cluster import connect\nbefore = ray._private.node.Node\n"
    body += "def node(*a, **k):\n    print('ready', flush=True)\n    time.sleep(60)\n    return before(*a, **k)\n"
    body += "ray._private.node.Node = node\nconnect()"
    code, said = end(start(body), signal.SIGTERM)
    assert (code, said.splitlines()[-1]) == (143, "name: Stopped.")
    assert "Traceback" not in said
