"""Code of a model is judged by its tests, and can do nothing else."""

import ctypes
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from mars_ray.errors import ConfigError, RunError
from mars_ray.evaluation import code_check
from mars_ray.evaluation.code_check import check_sandbox, passes_tests, program_of
from mars_ray.evaluation.sandboxed_program import KEYCTL

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
    assert passes_tests(FACTS, text) is right


def test_code_has_no_network() -> None:
    """A server of this very machine cannot be reached, not even its own address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"    import socket\n    socket.create_connection(('127.0.0.1', {port}), 2)\n{BODY}"
        assert not passes_tests(FACTS, connect)
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
        assert not passes_tests(FACTS, f"    {harm}\n{BODY}")
    for harm in (f"remove({path})", f"truncate({path}, 0)", f"chmod({path}, 0)", f"utime({path})", f"stat({path})"):
        assert not passes_tests(FACTS, f"    import os; os.{harm}\n{BODY}")
    assert not passes_tests(FACTS, f"    import os; os.chmod(os.__file__, 0o777)\n{BODY}")
    assert passes_tests(FACTS, f"    open('own', 'w').write('x'); assert open('own').read() == 'x'\n{BODY}")


def test_code_cannot_mount_what_is_read_only_a_second_time_to_write_to_it() -> None:
    """Not where root starts it either."""
    again = 32 | 4096  # MS_REMOUNT | MS_BIND
    for path in ("/", "/usr/lib"):
        mount = f"assert ctypes.CDLL(None).mount(b'none', {path.encode()!r}, None, {again}, None) == -1"
        assert passes_tests(FACTS, f"    import ctypes; {mount}\n{BODY}")


def test_code_reaches_no_socket_of_another_process() -> None:
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        address = f"{folder}/s"
        server.bind(address)
        server.listen()
        connect = f"    import socket\n    socket.socket(socket.AF_UNIX).connect({address!r})\n{BODY}"
        assert not passes_tests(FACTS, connect)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)


def test_code_sees_no_other_process_and_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    looks = "import os; assert 'SECRET' not in os.environ and os.getpid() < 9"
    assert passes_tests(FACTS, f"    {looks}\n    try: os.kill({os.getpid()}, 0)\n    except OSError: {BODY.strip()}\n")


def test_code_that_wants_too_much_fails() -> None:
    assert not passes_tests(FACTS, f"    x = bytearray({code_check.MEMORY_MAX})\n{BODY}")
    assert not passes_tests(FACTS, f"    open('x', 'wb').write(bytes({2 * code_check.FOLDER_BYTES_MAX}))\n{BODY}")


def test_code_leaves_nothing_that_stops_the_next() -> None:
    assert passes_tests(FACTS, f"    import os\n    for _ in range(1500): os.mkdir('a'); os.chdir('a')\n{BODY}")
    assert passes_tests(FACTS, f"    import sys; sys.stderr.write('x' * 10 ** 6)\n{BODY}")


def test_code_that_never_ends_is_stopped_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even code that asks to outlive whoever started it stays."""
    monkeypatch.setattr(code_check, "CLOCK", 0.1)
    stay = "os.fork(); os.setsid(); ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); time.sleep(600)"
    assert not passes_tests(FACTS, f"    import ctypes, os, time\n    {stay}\n")
    launched = [
        each for each in psutil.process_iter(["cmdline"]) if code_check._PROGRAM in (each.info["cmdline"] or ())
    ]
    _, staying = psutil.wait_procs(launched, timeout=60)  # what is killed takes a moment to be gone
    assert not staying


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"humaneval cannot be run here\. bwrap, the sandbox .* install"):
        check_sandbox()
    with pytest.raises(RunError, match=r"bwrap.* is missing"):
        passes_tests(FACTS, BODY)


def test_a_sandbox_that_does_not_start_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RunError, match=r"did not start: bwrap: No permissions\. It needs user namespaces"):
        passes_tests(FACTS, BODY)


def test_a_body_continues_the_prompt_and_a_whole_function_replaces_it() -> None:
    head = "import math\n\n\n"
    tests = {"head": head, "test": TEST, "entry_point": "area"}
    assert program_of(PROMPT, TEST, "area", BODY) == {"answer": [PROMPT + BODY], **tests}
    whole = "def area(r):\n    return 3\n"
    assert program_of(PROMPT, TEST, "area", whole) == {"answer": [head, whole], **tests}


@pytest.mark.parametrize(
    "trick",
    [
        f"    import os; os._exit({code_check.PASSED})\n",
        f"    raise SystemExit({code_check.PASSED})\n",
        f"    import os, signal; os.kill(os.getppid(), signal.SIGKILL); os._exit({code_check.PASSED})\n",
        "    class Any:\n        def __round__(self, _): return 3.14\n    return Any()\n",
        "    class Any(float):\n        def __round__(self, _): return 3.14\n    return Any(1)\n",
        "    class Any(float):\n        def __eq__(self, _): return True\n    return Any(1)\n",
        "    import builtins; builtins.round = lambda *_: 3.14; return 1\n",
        "    import sys; sys.modules['__main__'].judge = lambda *_: None; return 1\n",
        "    import sys\n    frame = sys._getframe()\n    while frame.f_back: frame = frame.f_back\n"
        "    return frame.f_globals['program']['test']\n",
    ],
)
def test_an_answer_passes_by_its_values_alone(trick: str) -> None:
    assert not passes_tests(FACTS, trick)


def test_an_answer_cannot_write_into_the_judge() -> None:
    attach = "assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == -1"  # PTRACE_ATTACH
    assert passes_tests(FACTS, f"    import ctypes, os; {attach}\n{BODY}")


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("collections.Counter('aab')", "{'a': 2, 'b': 1}"),
        ("(1, [2.5, {3}], None, True)", "(1, [2.5, {3}], None, True)"),
        ("{1: ('a', b'b')}", "{1: ('a', b'b')}"),
        ("float('inf')", "float('inf')"),
        ("1j", "1j"),
        ("frozenset('a')", "frozenset('a')"),
    ],
)
def test_values_of_python_s_own_types_come_to_the_tests_as_they_are(returned: str, expected: str) -> None:
    test = f"def check(candidate):\n    assert candidate(1) == {expected}\n"
    facts = json.dumps({"prompt": PROMPT, "test": test, "entry_point": "area"})
    assert passes_tests(facts, f"    import collections\n    return {returned}\n")


def test_tests_find_the_functions_above_the_one_that_is_asked_for() -> None:
    prompt = f"def twice(x):\n    return 2 * x\n\n\n{PROMPT}"
    test = "def check(candidate):\n    assert candidate(1) == twice(area(0.5))\n"
    facts = json.dumps({"prompt": prompt, "test": test, "entry_point": "area"})
    assert passes_tests(facts, "    return r\n")


def test_an_error_of_the_answer_is_one_of_its_kind_in_the_tests() -> None:
    test = "def check(candidate):\n    try: candidate(0)\n    except ZeroDivisionError: return\n    assert False\n"
    facts = json.dumps({"prompt": PROMPT, "test": test, "entry_point": "area"})
    assert passes_tests(facts, "    return 1 / r\n")
    assert not passes_tests(facts, "    return {}[r]\n")


def test_memory_that_poses_as_a_file_is_limited() -> None:
    fill = f"os.write(os.memfd_create('x'), bytes(1024)) if n else os.truncate(fd, {2 * code_check.FOLDER_BYTES_MAX})"
    assert not passes_tests(FACTS, f"    import os\n    fd = os.memfd_create('x')\n    for n in (1, 0): {fill}\n{BODY}")
    assert passes_tests(FACTS, f"    import os\n    assert os.write(os.memfd_create('x'), bytes(1024)) == 1024\n{BODY}")


def test_code_makes_no_user_namespace() -> None:
    bwrap = shutil.which("bwrap")
    if not bwrap or not code_check._without_namespaces(bwrap):
        pytest.skip("this bubblewrap cannot forbid them here")
    unshare = "assert ctypes.CDLL(None).unshare(0x10000000) == -1"  # CLONE_NEWUSER
    assert passes_tests(FACTS, f"    import ctypes; {unshare}\n{BODY}")


def test_code_has_not_the_keys_of_whoever_evaluates() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    number = KEYCTL[os.uname().machine]
    if libc.syscall(number - 2, b"user", b"mars-ray-secret", b"s", 1, -3) == -1:  # add_key, to the session's keyring
        pytest.skip(f"no keys here: {os.strerror(ctypes.get_errno())}")
    search = f"ctypes.CDLL(None).syscall({number}, 10, -3, b'user', b'mars-ray-secret', 0)"  # KEYCTL_SEARCH
    assert passes_tests(FACTS, f"    import ctypes; assert {search} == -1\n{BODY}")
