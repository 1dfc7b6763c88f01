"""`mars-ray keys`: a key is printed once and works; the file and the lists never tell it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mars_ray.errors import ConfigError, DataError, OutputError
from mars_ray.platform.accounts.account_store import open_account_store, open_audit_log
from mars_ray.platform.cli.keys import accounts_app, keys_app
from mars_ray.serve.middleware.api_keys import digest
from tests.serve.key_samples import key_file


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
    found = key_file(path).read().find(digest(key))
    assert found and (found.name, found.role) == ("ada", "use")
    assert key not in path.read_text()


def test_what_add_says_besides_does_not_repeat_the_key(path: Path) -> None:
    done = keys("add", "--file", path, "--name", "ada")
    assert done.stdout.strip() not in done.stderr
    assert "not stored" in done.stderr


def test_a_role_can_be_given_and_only_one_there_is(path: Path) -> None:
    key = added(path, "root", "--role", "operate").strip()
    found = key_file(path).read().find(digest(key))
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
    path.write_text("keys: []\n")
    done = keys("list", "--file", path)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "nobody" in done.stderr


def test_a_removed_key_is_gone_and_the_others_stay(path: Path) -> None:
    ada, bob = added(path, "ada").strip(), added(path, "bob").strip()
    assert keys("remove", "--file", path, "--name", "ada").exit_code == 0
    table = key_file(path).read()
    assert table.find(digest(ada)) is None
    assert table.find(digest(bob))


def test_a_file_or_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "keys.yaml"
    assert isinstance(keys("list", "--file", missing).exception, DataError)
    assert isinstance(keys("add", "--file", missing, "--name", "ada").exception, OutputError)


def test_everything_about_a_key_can_be_given_changed_and_listed(tmp_path: Path) -> None:
    storage = ("--storage", str(tmp_path / "storage"))
    more = ("--class", "gold", "--account", "team", "--expires", "90d")
    limits = ("--limit", "requests_per_minute=60", "--limit", "money_per_day=2.5")
    key = keys("add", "--name", "ada", *storage, *more, *limits).stdout.strip()
    new = keys("rotate", "--name", "ada", "--grace", "1h", *storage).stdout.strip()
    assert keys("set", "--name", "ada", "--role", "operate", "--limit", "tokens_per_day=9", *storage).exit_code == 0
    table = open_account_store("storage", str(tmp_path / "storage")).read()
    assert table.find(digest(key)) == table.find(digest(new)) == table.keys[0]
    shown = keys("list", *storage).stdout
    words = ["ada", "operate", "gold", "account=team", "expires=", "old key until", "tokens_per_day=9"]
    assert [word for word in words if word not in shown] == []
    assert "requests_per_minute" not in shown
    assert key not in shown and new not in shown and table.keys[0].sha256 not in shown


def test_accounts_are_set_listed_and_removed(path: Path) -> None:
    added(path, "ada")
    run = CliRunner().invoke
    file = ["--file", str(path)]
    assert run(accounts_app, ["set", "--name", "team", "--limit", "tokens_per_month=1000000", *file]).exit_code == 0
    assert run(accounts_app, ["list", *file]).stdout == "team  tokens_per_month=1000000\n"
    assert run(accounts_app, ["remove", "--name", "team", *file]).exit_code == 0
    assert run(accounts_app, ["list", *file]).stdout == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["add", "--name", "ada"], "taken"),
        (["add", "--name", "a b"], "name is"),
        (["remove", "--name", "eve"], "It has: ada"),
        (["add", "--name", "eve", "--expires", "tomorrow"], ""),
        (["add", "--name", "eve", "--expires", "2020-01-01T00:00:00Z"], ""),
        (["add", "--name", "eve", "--expires", "2099-01-01"], ""),
        (["add", "--name", "eve", "--expires", "99999999999d"], ""),
        (["add", "--name", "eve", "--limit", "requests_per_minute"], ""),
        (["add", "--name", "eve", "--limit", "requests=5"], ""),
        (["rotate", "--name", "ada", "--grace", "-1h"], ""),
        (["rotate", "--name", "eve"], ""),
        (["set", "--name", "ada"], ""),
        (["set", "--name", "eve", "--role", "use"], ""),
        (["add", "--name", "eve", "--storage", "s"], ""),
    ],
)
def test_a_bad_option_is_a_line_and_changes_nothing(path: Path, words: list[str], said: str) -> None:
    added(path, "ada")
    before = path.read_text()
    done = keys(*words, "--file", path)
    assert isinstance(done.exception, ConfigError) and "\n" not in str(done.exception)
    assert said in str(done.exception)
    assert path.read_text() == before
    assert done.stdout == ""


def test_commands_on_a_storage_are_in_its_audit_log_without_a_secret(tmp_path: Path) -> None:
    storage = str(tmp_path / "storage")
    secrets = [keys("add", "--name", "ada", "--storage", storage).stdout.strip()]
    secrets.append(keys("rotate", "--name", "ada", "--storage", storage).stdout.strip())
    keys("remove", "--name", "ada", "--storage", storage)
    events = open_audit_log(storage).read().events
    assert [event.action for event in events] == ["key.removed", "key.rotated", "key.added"]
    assert all(event.by.startswith("command:") and event.subject == "ada" for event in events)
    files = b"".join(path.read_bytes() for path in (tmp_path / "storage" / "accounts" / "audit").iterdir())
    assert not any(secret.encode() in files or digest(secret).encode() in files for secret in secrets)
