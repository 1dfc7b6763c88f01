"""Keys are found, added, changed, revoked and reloaded, and a broken file takes none away."""

import asyncio
import logging
import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.errors import ConfigError, DataError, OutputError
from mars_ray.serve.middleware.api_keys import KEYS_MAX, Key, Role, SimpleKeys, digest, parse_keys, role_allows
from mars_ray.serve.middleware.key_store import CHECK_SECONDS, LiveKeys
from tests.factories.clock import Clock
from tests.serve.key_samples import BY, add_key, found, key_file, live_keys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def entry(name: str = "ada", role: str = "use", sha256: str = "0" * 64, **more: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "sha256": sha256, "created": date(2026, 1, 2), **more}


def write(path: Path, *entries: object) -> None:
    path.write_text(yaml.safe_dump({"keys": list(entries)}))


def remove_key(path: Path, name: str) -> None:
    key_file(path).remove(BY, name)


def test_a_key_is_found_by_what_was_told_once_and_by_nothing_else(path: Path, clock: Clock) -> None:
    ada, bob = add_key(path, "ada", "use"), add_key(path, "bob", "operate")
    keys = live_keys(path, clock)
    assert [(key.name, key.role) for key in (found(keys, ada), found(keys, bob)) if key] == [
        ("ada", "use"),
        ("bob", "operate"),
    ]
    assert [found(keys, guess) for guess in ("", ada[:-1], ada + "A", ada.upper(), ada + "\n", "ключ", "\udcff")] == [
        None
    ] * 7


def test_a_key_is_256_random_bits_and_the_file_holds_only_its_hash(path: Path) -> None:
    told = [add_key(path, name, "use") for name in ("ada", "bob")]
    assert len(set(told)) == 2
    assert all(len(key) == len("mars-") + 43 and key.startswith("mars-") for key in told)
    assert not any(key in path.read_text() or key.removeprefix("mars-") in path.read_text() for key in told)
    assert [set(each) for each in yaml.safe_load(path.read_text())["keys"]] == [
        {"name", "role", "sha256", "created"}
    ] * 2


@given(st.text())
def test_no_text_that_is_presented_raises(path: Path, presented: str) -> None:
    write(path, entry())
    assert found(live_keys(path), presented) is None


def test_a_key_is_looked_up_by_its_digest_alone(path: Path) -> None:
    """Callers cannot choose digests, so the time of a lookup reveals nothing about a stored key."""
    ada = add_key(path, "ada", "use")
    table = key_file(path).read()
    looked: list[object] = []

    class Noted(dict):
        def get(self, key: object, default: object = None) -> object:
            looked.append(key)
            return super().get(key, default)

    table._key_of_hash = Noted(table._key_of_hash)
    assert table.find(digest(ada)) is table.keys[0]
    assert table.find(digest(ada[:-1] + "~")) is None
    assert all(isinstance(key, str) and len(key) == 64 for key in looked) and len(looked) == 2


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
        ([entry(), entry("bob", "admin", "1" * 64)], ["key 2", "role", "'admin'"]),
        ([entry(), entry(sha256="1" * 64)], ["key 2", "'ada'", "taken"]),
        ([entry(), entry("bob")], ["key 2", "'bob'", "hash"]),
        ([entry(sha256="abc")], ["key 1", "sha256", "'abc'"]),
        ([entry(sha256="0" * 63 + "\n")], ["key 1", "sha256"]),
        ([entry(sha256="A" * 64)], ["key 1", "sha256"]),
        ([entry(name="two words")], ["key 1", "name", "'two words'"]),
        ([entry(note="x")], ["key 1", "note", "not a field"]),
        ([{"name": "ada", "role": "use", "sha256": "0" * 64}], ["key 1", "created", "missing"]),
        ([entry() | {"created": "2026-13-45"}], ["key 1", "created", "'2026-13-45'"]),
        (["ada"], ["key 1", "'ada'"]),
        ([[["ada"]]], ["key 1", "list"]),
    ],
)
def test_an_unusable_entry_is_named_with_its_value(path: Path, entries: list[object], said: list[str]) -> None:
    write(path, *entries)
    with pytest.raises(DataError) as caught:
        live_keys(path)
    assert all(part in str(caught.value) for part in [str(path), *said])
    assert "\n" not in str(caught.value)


def test_a_key_put_where_its_hash_belongs_is_not_told_to_the_log(path: Path) -> None:
    secret = "mars-dHVwNG1vcmUtc2VjcmV0LXRoYW4tdGhpcy1pc19h"
    write(path, entry(sha256=secret))
    with pytest.raises(DataError) as caught:
        live_keys(path)
    assert secret[:8] in str(caught.value)
    assert secret[:10] not in str(caught.value)
    write(path, entry(key=secret))
    with pytest.raises(DataError) as caught:
        live_keys(path)
    assert secret[:8] not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"ada",
        b"{}",
        b"[]",
        b"{keys: {}}",
        b"{keys: [], more: []}",
        b"[",
        b"\xff",
        b"\x00",
        b"- !!timestamp x",
        b"- &a [*a]",
        b"[" * 5000,
        b"- {[a]: b}",
    ],
)
def test_what_is_no_list_of_keys_is_refused_at_the_start(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"keys\.yaml"):
        live_keys(path)


def test_a_missing_file_is_refused_at_the_start_and_an_empty_list_lets_nobody_in(path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        live_keys(path)
    path.write_text("keys: []\n")
    assert found(live_keys(path), "mars-any") is None


def test_a_removed_key_is_revoked_and_an_added_one_works_at_the_next_check(path: Path, clock: Clock) -> None:
    ada = add_key(path, "ada", "use")
    keys = live_keys(path, clock)
    remove_key(path, "ada")
    bob = add_key(path, "bob", "use")
    clock.now_s += CHECK_SECONDS
    assert found(keys, ada) is None
    assert found(keys, bob)


def test_the_file_is_looked_at_at_most_once_a_second(path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    ada = add_key(path, "ada", "use")
    keys = live_keys(path, clock)
    remove_key(path, "ada")
    looked: list[int] = []
    real = keys.store.version

    def noted() -> Any:
        looked.append(1)
        return real()

    monkeypatch.setattr(keys.store, "version", noted)

    async def callers() -> None:
        await asyncio.gather(*(keys.refresh() for _ in range(3)))
        await keys.refresh()

    asyncio.run(callers())
    assert len(looked) == 0 and keys.table.find(digest(ada))
    clock.now_s += CHECK_SECONDS
    asyncio.run(callers())
    assert len(looked) == 1 and keys.table.find(digest(ada)) is None


@pytest.mark.parametrize("broken", [b"[", b"", b"keys: [{name: ada}]", None])
def test_a_broken_file_keeps_the_keys_read_before_and_is_reported_once(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, broken: bytes | None
) -> None:
    ada = add_key(path, "ada", "use")
    good = path.read_bytes()
    keys = live_keys(path, clock)
    path.unlink() if broken is None else path.write_bytes(broken)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            clock.now_s += CHECK_SECONDS
            assert found(keys, ada)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert str(path) in caplog.text
    path.write_bytes(good.replace(b"name: ada", b"name: eve"))
    clock.now_s += CHECK_SECONDS
    renamed = found(keys, ada)
    assert renamed and renamed.name == "eve"


def test_a_file_that_could_not_be_read_once_is_read_when_it_can(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the same by then, so a stamp remembered too early would hide the revocation for ever."""
    ada = add_key(path, "ada", "use")
    keys = live_keys(path, clock)
    remove_key(path, "ada")

    def too_many_files(self: Path) -> bytes:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as busy:
        busy.setattr(Path, "read_bytes", too_many_files)
        clock.now_s += CHECK_SECONDS
        assert found(keys, ada)
    clock.now_s += CHECK_SECONDS
    assert found(keys, ada) is None


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_read_again(path: Path, clock: Clock) -> None:
    ada = add_key(path, "ada", "use")
    keys = live_keys(path, clock)
    seen = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"name: ada", b"name: eve"))
    os.utime(other, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    other.replace(path)
    clock.now_s += CHECK_SECONDS
    renamed = found(keys, ada)
    assert renamed and renamed.name == "eve"


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
    assert found(live_keys(path), "mars-x") is None


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
        "import sys; from pathlib import Path; from tests.serve.key_samples import add_key\n"
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
    keys = live_keys(path)
    assert {key.name for key in (found(keys, each) for each in told) if key} == {
        f"{who}-{n}" for who in ("ada", "bob", "eve") for n in range(8)
    }


# --- expiry, rotation, limits, accounts ---

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)


def test_a_key_is_valid_until_it_expires_and_its_old_secret_until_the_grace_ends() -> None:
    ends = {"expires": NOW + timedelta(days=9), "old_expires": NOW + timedelta(hours=1)}
    key = Key(name="ada", role="use", sha256="0" * 64, old_sha256="1" * 64, created=NOW.date(), **ends)
    valid = {
        (sha256[0], hours): not key.expired(sha256, NOW + timedelta(hours=hours))
        for sha256 in key.hashes
        for hours in (0, 1, 215, 216)
    }
    assert {moment for moment, is_valid in valid.items() if is_valid} == {("0", 0), ("0", 1), ("0", 215), ("1", 0)}


@pytest.mark.platform
def test_a_rotated_key_has_a_new_secret_and_the_old_one_for_a_while_and_an_older_one_no_more(path: Path) -> None:
    first = add_key(path, "ada", "operate", account="team", limits={"requests_per_minute": 5})
    store = key_file(path)
    second = store.rotate(BY, "ada", 60)
    third = store.rotate(BY, "ada", 3600)
    table = store.read()
    assert table.find(digest(first)) is None
    assert table.find(digest(second)) == table.find(digest(third))
    [key] = table.keys
    assert (key.role, key.account, key.limits.requests_per_minute) == ("operate", "team", 5)
    assert not any(secret in path.read_text() for secret in (first, second, third))


def test_a_grace_of_nothing_ends_the_old_secret_at_once(path: Path) -> None:
    old = add_key(path, "ada", "use")
    store = key_file(path)
    store.rotate(BY, "ada", 0)
    key = store.read().find(digest(old))
    assert key and key.expired(digest(old), store.now())


@pytest.mark.platform
def test_a_change_keeps_what_it_does_not_name(path: Path) -> None:
    ada = add_key(path, "ada", "use", account="team", limits={"tokens_per_day": 10})
    store = key_file(path)
    store.update(BY, "ada", role="operate", account=None)
    key = store.read().find(digest(ada))
    assert key and (key.role, key.account, key.limits.tokens_per_day) == ("operate", None, 10)


@pytest.mark.platform
def test_accounts_are_set_replaced_and_removed(path: Path) -> None:
    add_key(path, "ada", "use")
    store = key_file(path)
    store.set_account(BY, name="auth0|17", limits={"money_per_month": 20}, service_class="gold")
    store.set_account(BY, name="auth0|17", limits={"tokens_per_minute": 1000})
    [account] = store.read().accounts
    assert account.model_dump(exclude_defaults=True) == {"name": "auth0|17", "limits": {"tokens_per_minute": 1000}}
    store.remove_account(BY, "auth0|17")
    assert store.read().accounts == ()
    with pytest.raises(ConfigError, match=r"no account named 'auth0|17'"):
        store.remove_account(BY, "auth0|17")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"expires": NOW - timedelta(days=9999)}, "past"),
        ({"expires": "soon"}, "expires is 'soon'"),
        ({"expires": "2099-01-01T00:00:00"}, "timezone"),
        ({"service_class": "x" * 65}, "service_class"),
        ({"owner": "x"}, "owner is not a field"),
    ],
)
def test_bad_fields_are_named_and_change_nothing(path: Path, fields: dict[str, Any], said: str) -> None:
    check_bad_fields(path, fields, said)


@pytest.mark.platform
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"limits": {"requests_per_minute": "many"}}, "'many'"),
        ({"limits": {"money_per_day": float("nan")}}, "limits.money_per_day"),
        ({"account": "two words"}, "account is 'two words'"),
        ({"account": ""}, "account is ''"),
        ({"limits": {"requests_per_minute": 0}}, "limits.requests_per_minute is 0"),
        ({"limits": {"tokens_per_day": 10**16}}, "limits.tokens_per_day is 10000000000000000"),
        ({"limits": {"requests_a_minute": 5}}, "limits.requests_a_minute is not a field"),
    ],
)
def test_bad_accounts_and_limits_are_named_and_change_nothing(path: Path, fields: dict[str, Any], said: str) -> None:
    check_bad_fields(path, fields, said)


def check_bad_fields(path: Path, fields: dict[str, Any], said: str) -> None:
    add_key(path, "bob", "use")
    before = path.read_bytes()
    for change in (lambda: add_key(path, "ada", "use", **fields), lambda: key_file(path).update(BY, "bob", **fields)):
        with pytest.raises(ConfigError) as caught:
            change()
        assert said in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_a_change_during_a_check_is_seen_by_the_next_caller(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_key(path, "ada", "use")
    keys = LiveKeys(key_file(path))
    checking, go_on, real = threading.Event(), threading.Event(), keys.check

    def slow_check() -> None:
        real()
        checking.set()
        go_on.wait(60)

    async def changed_meanwhile() -> bool:
        keys.expire()
        with monkeypatch.context() as patched:
            patched.setattr(keys, "check", slow_check)
            first = asyncio.create_task(keys.refresh())
            await asyncio.to_thread(checking.wait, 60)
        bob = add_key(path, "bob", "use")
        keys.expire()
        second = asyncio.create_task(keys.refresh())
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(first, second)
        return keys.table.find(digest(bob)) is not None

    assert asyncio.run(changed_meanwhile())


def test_a_grace_without_end_is_refused(path: Path) -> None:
    add_key(path, "ada", "use")
    with pytest.raises(ConfigError, match="too long"):
        key_file(path).rotate(BY, "ada", 1e15)


def test_a_huge_table_is_refused_by_its_size() -> None:
    keys = [Key(name=f"k{n}", role="use", sha256=f"{n:064x}", created=NOW.date()) for n in range(KEYS_MAX + 1)]
    with pytest.raises(ConfigError, match="more than 10000"):
        SimpleKeys("keys", keys)
    whole = SimpleKeys("keys", keys[:-1])
    assert parse_keys(SimpleKeys, "keys", whole.to_bytes("json"), "json").keys == whole.keys


def test_a_key_of_an_unknown_class_stops_the_start_and_later_only_itself(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ada = add_key(path, "ada", "use")
    keys = LiveKeys(key_file(path), clock, classes=["gold"])
    add_key(path, "typo", "use", "glod")
    remove_key(path, "ada")
    keys.check()
    assert "'glod', must be one of gold" in caplog.text
    assert keys.table.find(digest(ada)) is None, "the revocation beside it holds"
    with pytest.raises(ConfigError, match="glod"):
        LiveKeys(key_file(path), clock, classes=["gold"])


def test_callers_do_not_wait_for_a_store_that_hangs(path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    add_key(path, "ada", "use")
    keys = live_keys(path, clock)
    checks = 0

    async def hang() -> None:
        nonlocal checks
        checks += 1
        await asyncio.Event().wait()

    async def callers() -> None:
        monkeypatch.setattr(keys, "_check_once", hang)
        await asyncio.gather(*(keys.refresh() for _ in range(20)))
        clock.now_s += CHECK_SECONDS
        for _ in range(1000):  # none of these waits, or this would take a quarter of an hour
            await keys.refresh()

    clock.now_s += CHECK_SECONDS
    asyncio.run(asyncio.wait_for(callers(), 60))
    assert checks == 1


def test_a_revocation_holds_while_other_calls_fill_the_shared_threads(path: Path, clock: Clock) -> None:
    ada = add_key(path, "ada", "use")
    keys = live_keys(path, clock)
    remove_key(path, "ada")
    clock.now_s += CHECK_SECONDS
    end = threading.Event()

    async def callers() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        listing = asyncio.create_task(asyncio.to_thread(end.wait, 60))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(20):
                while keys.table.find(digest(ada)) is not None:
                    await keys.refresh()
                    await asyncio.sleep(0)
        finally:
            end.set()
            await listing

    asyncio.run(callers())
