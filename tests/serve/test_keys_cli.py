"""`mars-ray keys`: a key is printed once and works; the file and the lists never tell it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mars_ray.cli.keys import keys_app
from mars_ray.errors import ConfigError, OutputError
from mars_ray.serve.middleware.api_keys import KeyFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def keys(*words: object) -> Result:
    return CliRunner().invoke(keys_app, list(map(str, words)))


def added(path: Path, name: str, *more: str) -> str:
    done = keys("add", "--file", path, "--name", name, *more)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_key_is_all_that_add_prints_to_standard_output_and_it_works(path: Path) -> None:
    printed = added(path, "ada")
    key, end = printed[:-1], printed[-1]
    assert end == "\n" and "\n" not in key
    found = KeyFile(path).find(key)
    assert found and (found.name, found.role) == ("ada", "use")
    assert key not in path.read_text()


def test_what_add_says_besides_does_not_repeat_the_key(path: Path) -> None:
    done = keys("add", "--file", path, "--name", "ada")
    assert done.stdout.strip() not in done.stderr
    assert "not stored" in done.stderr


def test_a_role_can_be_given_and_only_one_there_is(path: Path) -> None:
    key = added(path, "root", "--role", "operate").strip()
    found = KeyFile(path).find(key)
    assert found and found.role == "operate"
    done = keys("add", "--file", path, "--name", "eve", "--role", "admin")
    assert done.exit_code == 2
    assert "admin" in done.stderr


def test_list_shows_names_roles_and_days_and_neither_key_nor_hash(path: Path) -> None:
    told = [added(path, "ada").strip(), added(path, "operator", "--role", "operate").strip()]
    done = keys("list", "--file", path)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[:2] for row in rows] == [["ada", "use"], ["operator", "operate"]]
    assert all(len(row) == 3 and len(row[2]) == len("2026-01-02") for row in rows)
    secrets = [*told, *(line.split()[1] for line in path.read_text().splitlines() if "sha256" in line)]
    assert not any(secret in done.output for secret in secrets)


def test_an_empty_list_says_that_nobody_may_call(path: Path) -> None:
    path.write_text("[]\n")
    done = keys("list", "--file", path)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "nobody" in done.stderr


def test_a_removed_key_is_gone_and_the_others_stay(path: Path) -> None:
    ada, bob = added(path, "ada").strip(), added(path, "bob").strip()
    assert keys("remove", "--file", path, "--name", "ada").exit_code == 0
    file = KeyFile(path)
    assert file.find(ada) is None
    assert file.find(bob)


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["add", "--name", "ada"], ConfigError, "taken"),
        (["add", "--name", "a b"], ConfigError, "name is"),
        (["remove", "--name", "eve"], ConfigError, "It has: ada"),
    ],
)
def test_what_cannot_be_done_is_an_error_of_the_house_and_changes_nothing(
    path: Path, words: list[str], error: type[Exception], said: str
) -> None:
    added(path, "ada")
    before = path.read_text()
    done = keys(*words, "--file", path)
    assert isinstance(done.exception, error)
    assert said in str(done.exception)
    assert path.read_text() == before
    assert done.stdout == ""


def test_a_file_or_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "keys.yaml"
    assert isinstance(keys("list", "--file", missing).exception, ConfigError)
    assert isinstance(keys("add", "--file", missing, "--name", "ada").exception, OutputError)
