"""Code of a model is judged by its tests, and can do nothing else."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from mars_ray.errors import ConfigError, RunError
from mars_ray.evaluation.scoring import code_check
from mars_ray.evaluation.scoring.code_check import check_sandbox, passes, program_of

PROMPT = 'import math\n\n\ndef area(r):\n    """The area of a circle."""\n'
TEST = "def check(candidate):\n    assert round(candidate(1), 2) == 3.14\n"
FACTS = json.dumps({"prompt": PROMPT, "test": TEST, "entry_point": "area"})
BODY = "    return math.pi * r * r\n"


@pytest.fixture(scope="module", autouse=True)
def shut_off() -> None:
    try:
        check_sandbox()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (BODY, True),
        (f"Sure:\n```python\n{PROMPT}{BODY}```\nThat is it.", True),
        (f"```\ndef area(r):\n{BODY}", True),
        ("    return 3\n", False),
        ("I do not know.", False),
        ("", False),
        ("    exit(0)\n", False),
        ("    import os; os._exit(0)\n", False),
        (f"def area(r):\n{BODY}\nif __name__ == '__main__':\n    print(area(float(input())))\n", True),
        (f"from __future__ import annotations\ndef area(r: Any):\n{BODY}", True),
    ],
)
def test_code_is_right_when_it_passes_its_tests(text: str, right: bool) -> None:
    assert passes(FACTS, text) is right


def test_code_has_no_network() -> None:
    """A server of this very machine cannot be reached, not even its own address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"    import socket\n    socket.create_connection(('127.0.0.1', {port}), 2)\n{BODY}"
        assert not passes(FACTS, connect)
        socket.create_connection(("127.0.0.1", port), 2).close()


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "secret"
    path.write_text("s")
    before = path.stat()
    yield path
    assert path.read_text() == "s"
    assert (path.stat().st_mode, path.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_code_neither_reads_nor_changes_files_beyond_its_folder(secret: Path) -> None:
    path = repr(str(secret))
    for harm in (f"open({path})", f"open({path}, 'a')", "open('/new', 'w')"):
        assert not passes(FACTS, f"    {harm}\n{BODY}")
    for harm in (f"remove({path})", f"truncate({path}, 0)", f"chmod({path}, 0)", f"utime({path})", f"stat({path})"):
        assert not passes(FACTS, f"    import os; os.{harm}\n{BODY}")
    assert not passes(FACTS, f"    import os; os.chmod(os.__file__, 0o777)\n{BODY}")
    assert passes(FACTS, f"    open('own', 'w').write('x'); assert open('own').read() == 'x'\n{BODY}")


def test_code_cannot_mount_what_is_read_only_a_second_time_to_write_to_it() -> None:
    """Not where root starts it either."""
    again = 32 | 4096  # MS_REMOUNT | MS_BIND
    for path in ("/", "/usr/lib"):
        mount = f"assert ctypes.CDLL(None).mount(b'none', {path.encode()!r}, None, {again}, None) == -1"
        assert passes(FACTS, f"    import ctypes; {mount}\n{BODY}")


def test_code_reaches_no_socket_of_another_process() -> None:
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        address = f"{folder}/s"
        server.bind(address)
        server.listen()
        connect = f"    import socket\n    socket.socket(socket.AF_UNIX).connect({address!r})\n{BODY}"
        assert not passes(FACTS, connect)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)


def test_code_sees_no_other_process_and_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    looks = "import os; assert 'SECRET' not in os.environ and os.getpid() < 9"
    assert passes(FACTS, f"    {looks}\n    try: os.kill({os.getpid()}, 0)\n    except OSError: {BODY.strip()}\n")


def test_code_that_wants_too_much_fails() -> None:
    assert not passes(FACTS, f"    x = bytearray({code_check.MEMORY_MAX})\n{BODY}")
    assert not passes(FACTS, f"    open('x', 'wb').write(bytes({2 * code_check.FOLDER_BYTES_MAX}))\n{BODY}")


def test_code_leaves_nothing_that_stops_the_next() -> None:
    assert passes(FACTS, f"    import os\n    for _ in range(1500): os.mkdir('a'); os.chdir('a')\n{BODY}")
    assert passes(FACTS, f"    import sys; sys.stderr.write('x' * 10 ** 6)\n{BODY}")


def test_code_that_never_ends_is_stopped_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even code that asks to outlive whoever started it stays."""
    monkeypatch.setattr(code_check, "CLOCK", 0.1)
    stay = "os.fork(); os.setsid(); ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); time.sleep(600)"
    assert not passes(FACTS, f"    import ctypes, os, time\n    {stay}\n")
    launched = [
        each for each in psutil.process_iter(["cmdline"]) if code_check._LAUNCHER in (each.info["cmdline"] or ())
    ]
    _, staying = psutil.wait_procs(launched, timeout=60)  # what is killed takes a moment to be gone
    assert not staying


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"humaneval cannot be run here\. There is no bwrap .* install"):
        check_sandbox()
    with pytest.raises(RunError, match="no bwrap"):
        passes(FACTS, BODY)


def test_a_sandbox_that_does_not_start_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RunError, match=r"did not start: bwrap: No permissions\. It needs user namespaces"):
        passes(FACTS, BODY)


def test_a_body_continues_the_prompt_and_a_whole_function_replaces_it() -> None:
    tested = [TEST, "check(area)"]
    assert program_of(PROMPT, TEST, "area", BODY) == [PROMPT + BODY, *tested]
    whole = "def area(r):\n    return 3\n"
    assert program_of(PROMPT, TEST, "area", whole) == ["import math\n\n\n", whole, *tested]
