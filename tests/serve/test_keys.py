"""Keys are found, added, revoked and reloaded, and a broken file takes none away."""

import hmac
import logging
import os
import stat
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.errors import ConfigError, OutputError
from mars_ray.serve.middleware.api_keys import CHECK_SECONDS, KeyFile, Role, add_key, remove_key, role_allows


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_the_interval(self) -> None:
        self.now += CHECK_SECONDS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def entry(name: str = "ada", role: str = "use", sha256: str = "0" * 64, **more: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "sha256": sha256, "created": date(2026, 1, 2), **more}


def write(path: Path, *entries: object) -> None:
    path.write_text(yaml.safe_dump(list(entries)))


def test_a_key_is_found_by_what_was_told_once_and_by_nothing_else(path: Path, clock: FakeClock) -> None:
    ada, bob = add_key(path, "ada", "use"), add_key(path, "bob", "operate")
    keys = KeyFile(path, clock)
    assert [(key.name, key.role) for key in (keys.find(ada), keys.find(bob)) if key] == [
        ("ada", "use"),
        ("bob", "operate"),
    ]
    assert [keys.find(guess) for guess in ("", ada[:-1], ada + "A", ada.upper(), ada + "\n", "ключ", "\udcff")] == [
        None
    ] * 7


def test_a_key_is_256_random_bits_and_the_file_holds_only_its_hash(path: Path) -> None:
    told = [add_key(path, name, "use") for name in ("ada", "bob")]
    assert len(set(told)) == 2
    assert all(len(key) == len("mars-") + 43 and key.startswith("mars-") for key in told)
    assert not any(key in path.read_text() or key.removeprefix("mars-") in path.read_text() for key in told)
    assert [set(each) for each in yaml.safe_load(path.read_text())] == [{"name", "role", "sha256", "created"}] * 2


@given(st.text())
def test_no_text_that_is_presented_raises(path: Path, presented: str) -> None:
    write(path, entry())
    assert KeyFile(path).find(presented) is None


def test_every_entry_is_compared_in_constant_time_wherever_the_match_stands(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [add_key(path, f"key{n}", "use") for n in range(5)]
    keys = KeyFile(path, clock)
    compared: list[str] = []
    real = hmac.compare_digest

    def counting(stored: str, presented: str) -> bool:
        compared.append(stored)
        return real(stored, presented)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for presented in [*told, "mars-unknown"]:
        compared.clear()
        keys.find(presented)
        assert len(set(compared)) == 5


def test_operate_includes_use_and_not_the_other_way_round() -> None:
    roles: tuple[Role, ...] = ("use", "operate")
    assert {(role, needed) for role in roles for needed in roles if role_allows(role, needed)} == {
        ("use", "use"),
        ("operate", "use"),
        ("operate", "operate"),
    }


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([entry(), entry("bob", "admin", "1" * 64)], ["entry 2", "role", "'admin'"]),
        ([entry(), entry(sha256="1" * 64)], ["entry 2", "'ada'", "taken"]),
        ([entry(), entry("bob")], ["entry 2", "'bob'", "hash"]),
        ([entry(sha256="abc")], ["entry 1", "sha256", "'abc'"]),
        ([entry(sha256="0" * 63 + "\n")], ["entry 1", "sha256"]),
        ([entry(sha256="A" * 64)], ["entry 1", "sha256"]),
        ([entry(name="two words")], ["entry 1", "name", "'two words'"]),
        ([entry(note="x")], ["entry 1", "note", "not a field"]),
        ([{"name": "ada", "role": "use", "sha256": "0" * 64}], ["entry 1", "created", "missing"]),
        ([entry() | {"created": "2026-13-45"}], ["entry 1", "created", "'2026-13-45'"]),
        (["ada"], ["entry 1", "'ada'"]),
        ([[["ada"]]], ["entry 1", "list"]),
    ],
)
def test_an_unusable_entry_is_named_with_its_value(path: Path, entries: list[object], said: list[str]) -> None:
    write(path, *entries)
    with pytest.raises(ConfigError) as caught:
        KeyFile(path)
    assert all(part in str(caught.value) for part in [str(path), *said])
    assert "\n" not in str(caught.value)


def test_a_key_put_where_its_hash_belongs_is_not_told_to_the_log(path: Path) -> None:
    secret = "mars-dHVwNG1vcmUtc2VjcmV0LXRoYW4tdGhpcy1pc19h"
    write(path, entry(sha256=secret))
    with pytest.raises(ConfigError) as caught:
        KeyFile(path)
    assert secret[:8] in str(caught.value)
    assert secret[:10] not in str(caught.value)
    write(path, entry(key=secret))
    with pytest.raises(ConfigError) as caught:
        KeyFile(path)
    assert secret[:8] not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"ada", b"{}", b"[", b"\xff", b"\x00", b"- !!timestamp x", b"- &a [*a]", b"[" * 5000, b"- {[a]: b}"],
)
def test_what_is_no_list_of_keys_is_refused_at_the_start(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"keys\.yaml"):
        KeyFile(path)


def test_a_missing_file_is_refused_at_the_start_and_an_empty_list_lets_nobody_in(path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        KeyFile(path)
    path.write_text("[]\n")
    assert KeyFile(path).find("mars-any") is None


def test_a_removed_key_is_revoked_and_an_added_one_works_at_the_next_check(path: Path, clock: FakeClock) -> None:
    ada = add_key(path, "ada", "use")
    keys = KeyFile(path, clock)
    remove_key(path, "ada")
    bob = add_key(path, "bob", "use")
    clock.pass_the_interval()
    assert keys.find(ada) is None
    assert keys.find(bob)


def test_the_file_is_looked_at_at_most_once_a_second(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = add_key(path, "ada", "use")
    keys = KeyFile(path, clock)
    remove_key(path, "ada")
    clock.now += CHECK_SECONDS / 2
    assert keys.find(ada)
    looked: list[int] = []
    real = Path.stat

    def noted(self: Path, **options: Any) -> os.stat_result:
        looked.append(1)
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", noted)
    clock.pass_the_interval()
    for _ in range(3):
        assert keys.find(ada) is None
    assert len(looked) == 1


@pytest.mark.parametrize("broken", [b"[", b"", b"- name: ada", None])
def test_a_broken_file_keeps_the_keys_read_before_and_is_reported_once(
    path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture, broken: bytes | None
) -> None:
    ada = add_key(path, "ada", "use")
    good = path.read_bytes()
    keys = KeyFile(path, clock)
    path.unlink() if broken is None else path.write_bytes(broken)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            clock.pass_the_interval()
            assert keys.find(ada)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert str(path) in caplog.text
    path.write_bytes(good.replace(b"name: ada", b"name: eve"))
    clock.pass_the_interval()
    found = keys.find(ada)
    assert found
    assert found.name == "eve"


def test_a_file_that_could_not_be_read_once_is_read_when_it_can(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the same by then, so a stamp remembered too early would hide the revocation for ever."""
    ada = add_key(path, "ada", "use")
    keys = KeyFile(path, clock)
    remove_key(path, "ada")

    def too_many_files(self: Path, **options: str) -> str:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as busy:
        busy.setattr(Path, "read_text", too_many_files)
        clock.pass_the_interval()
        assert keys.find(ada)
    clock.pass_the_interval()
    assert keys.find(ada) is None


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_read_again(path: Path, clock: FakeClock) -> None:
    ada = add_key(path, "ada", "use")
    keys = KeyFile(path, clock)
    seen = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"ada", b"eve"))
    os.utime(other, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    other.replace(path)
    clock.pass_the_interval()
    found = keys.find(ada)
    assert found
    assert found.name == "eve"


def test_the_file_is_its_owners_alone_and_nothing_is_left_beside_it(path: Path) -> None:
    add_key(path, "ada", "use")
    path.chmod(0o644)
    add_key(path, "bob", "use")
    remove_key(path, "ada")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {each.name for each in path.parent.iterdir()} == {"keys.yaml", ".keys.yaml.lock"}


def test_a_write_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_key(path, "ada", "use")
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        add_key(path, "bob", "use")
    assert path.read_bytes() == before
    assert {each.name for each in path.parent.iterdir()} == {"keys.yaml", ".keys.yaml.lock"}


def test_a_link_to_the_file_stays_a_link(path: Path) -> None:
    link = path.with_name("link.yaml")
    link.symlink_to(path)
    add_key(link, "ada", "use")
    assert link.is_symlink()
    assert KeyFile(path).find("mars-x") is None


@pytest.mark.parametrize(("name", "role"), [("ada", "use"), ("", "use"), ("a b", "use"), ("bob", "admin")])
def test_a_taken_or_unusable_name_or_role_is_refused_and_changes_nothing(path: Path, name: str, role: Role) -> None:
    add_key(path, "ada", "use")
    before = path.read_bytes()
    with pytest.raises(ConfigError):
        add_key(path, name, role)
    assert path.read_bytes() == before


def test_removing_an_unknown_key_names_those_there_are(path: Path) -> None:
    add_key(path, "ada", "use")
    with pytest.raises(ConfigError, match=r"'bob'.*ada"):
        remove_key(path, "bob")


def test_a_folder_that_is_not_there_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="nowhere"):
        add_key(tmp_path / "nowhere" / "keys.yaml", "ada", "use")


def test_keys_added_by_several_processes_at_once_are_all_there(path: Path) -> None:
    adding = (
        "import sys; from pathlib import Path; from mars_ray.serve.middleware.api_keys import add_key\n"
        "sys.stdin.read(1)\n"
        "for n in range(8): print(add_key(Path(sys.argv[1]), f'{sys.argv[2]}-{n}', 'use'), flush=True)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", adding, path, who], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for who in ("ada", "bob", "eve")
    ]
    for process in processes:  # they wait for this, so that they start together
        assert process.stdin
        process.stdin.write(b"\n")
        process.stdin.flush()
    told = [line.decode() for process in processes for line in process.communicate(timeout=120)[0].splitlines()]
    keys = KeyFile(path)
    assert {key.name for key in map(keys.find, told) if key} == {
        f"{who}-{n}" for who in ("ada", "bob", "eve") for n in range(8)
    }
