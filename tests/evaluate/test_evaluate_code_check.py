"""Code of a model is judged by its tests, and can do nothing else."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mars_ray.errors import ConfigError
from mars_ray.evaluate import code_check
from mars_ray.evaluate.code_check import check_sandbox, passes, program_of

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
    ],
)
def test_code_is_right_when_it_passes_its_tests(text: str, right: bool) -> None:
    assert passes(FACTS, text) is right


def test_code_has_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of this very machine cannot be reached, not even its own address."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"    import socket\n    socket.create_connection(('127.0.0.1', {port}), 2)\n{BODY}"
        assert not passes(FACTS, connect)
        socket.create_connection(("127.0.0.1", port), 2).close()


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "secret"
    path.write_text("s")
    yield path
    assert path.read_text() == "s"


def test_code_neither_reads_nor_writes_files_beyond_its_folder(secret: Path) -> None:
    for mode in ("r", "w", "a"):
        assert not passes(FACTS, f"    open({str(secret)!r}, {mode!r}).close()\n{BODY}")
    assert not passes(FACTS, f"    import os; os.remove({str(secret)!r})\n{BODY}")
    assert passes(FACTS, f"    open('own', 'w').write('x'); assert open('own').read() == 'x'\n{BODY}")


def test_code_sees_no_other_process_and_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    assert passes(FACTS, f"    import os; assert os.getpid() == 1 and 'SECRET' not in os.environ\n{BODY}")


def test_code_that_wants_too_much_memory_fails() -> None:
    assert not passes(FACTS, f"    x = bytearray({code_check.MEMORY_MAX})\n{BODY}")


def test_code_that_never_ends_is_stopped_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_check, "SECONDS_MAX", 1)
    assert not passes(FACTS, "    import os, time; os.fork(); time.sleep(600)\n")


def test_without_unshare_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"humaneval cannot be run here: .* there is no unshare"):
        check_sandbox()
    assert not passes(FACTS, BODY)


def test_a_body_continues_the_prompt_and_a_whole_function_replaces_it() -> None:
    assert program_of(PROMPT, TEST, "area", BODY).startswith(PROMPT + BODY)
    whole = program_of(PROMPT, TEST, "area", "def area(r):\n    return 3\n")
    assert whole.count("def area") == 1
    assert whole.startswith("import math\n")
