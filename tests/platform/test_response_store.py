"""The store of responses keeps to its bounds, keeps the newest, and shows nobody another's."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.errors import RequestError, ResponseNotFoundError, UnavailableError
from mars_ray.platform.responses.response_store import (
    DAY_SECONDS,
    ROW_BYTES,
    ResponseStore,
    StoreBounds,
    StoredResponse,
    Turn,
    remove_stale,
)


def response(id: str, previous: str | None = None, text: str = "") -> StoredResponse:
    return StoredResponse(id, previous, json.dumps([f"in {id}"]), json.dumps({"id": id, "output": [f"out {id}", text]}))


@contextmanager
def opened(clock: Callable[[], float] = lambda: 0.0, **bounds: float) -> Iterator[ResponseStore]:
    with TemporaryDirectory() as folder:
        yield ResponseStore(Path(folder) / "store", StoreBounds(**bounds), clock)  # type: ignore[arg-type]


def holds(store: ResponseStore, owner: str, id: str) -> bool:
    try:
        return bool(store.get(owner, id))
    except ResponseNotFoundError:
        return False


OWNERS = ("ada", "bob", "")
PUTS = st.lists(
    st.tuples(st.sampled_from(OWNERS), st.integers(0, 3 * ROW_BYTES), st.integers(0, 30)), min_size=1, max_size=40
)


@given(PUTS)
def test_what_is_kept_is_the_newest_within_the_bounds(puts: list[tuple[str, int, int]]) -> None:
    now = [0.0]
    owner_bytes, total_bytes, seconds = 8 * ROW_BYTES, 14 * ROW_BYTES, 60
    kept: list[tuple[str, StoredResponse, float]] = []  # the same, slowly: drop from the front until all bounds hold
    with opened(lambda: now[0], owner_bytes=owner_bytes, total_bytes=total_bytes, seconds=seconds) as store:
        for number, (owner, length, pause) in enumerate(puts):
            now[0] += pause
            stored = response(f"{number}", text="x" * length)
            assert store.put(owner, stored)
            kept = [each for each in kept if each[2] > now[0] - seconds] + [(owner, stored, now[0])]
            while sum(each.bytes for whose, each, _ in kept if whose == owner) > owner_bytes:
                del kept[next(place for place, each in enumerate(kept) if each[0] == owner)]
            while sum(each.bytes for _, each, _ in kept) > total_bytes:
                del kept[0]
            expected = {(whose, each.id) for whose, each, _ in kept}
            there = {(whose, f"{id}") for whose in OWNERS for id in range(number + 1) if holds(store, whose, f"{id}")}
            assert there == expected


def test_a_response_beyond_a_bound_is_not_stored_and_drops_nothing() -> None:
    with opened(owner_bytes=3 * ROW_BYTES) as store:
        assert store.put("ada", response("a"))
        assert not store.put("ada", response("b", text="x" * 3 * ROW_BYTES))
        assert holds(store, "ada", "a") and not holds(store, "ada", "b")


def test_a_response_expires_after_its_time_and_leaves_an_empty_store() -> None:
    now = [0.0]
    with opened(lambda: now[0]) as store:
        store.put("ada", response("a"))
        now[0] = DAY_SECONDS - 1
        assert holds(store, "ada", "a") and not store.drop_expired()
        now[0] = DAY_SECONDS
        assert not holds(store, "ada", "a")
        with pytest.raises(ResponseNotFoundError, match="'a' not found"):
            store.delete("ada", "a")
        assert store.drop_expired()


def test_another_owners_response_is_as_unknown_as_none() -> None:
    with opened() as store:
        store.put("ada", response("a"))
        said = []
        for owner, id in (("bob", "a"), ("", "a"), ("ada", "x"), ("ada", "\0")):
            for ask in (store.get, store.delete, lambda owner, id: store.chain(owner, id, 1000)):
                with pytest.raises(ResponseNotFoundError) as error:
                    ask(owner, id)
                said.append(str(error.value).replace("'x'", "'a'").replace("'\\x00'", "'a'"))
        assert len(set(said)) == 1
        assert holds(store, "ada", "a")


def test_a_conversation_is_the_chain_of_its_responses_oldest_first() -> None:
    with opened() as store:
        store.put("ada", response("a"))
        store.put("ada", response("b", "a"))
        store.put("ada", response("other", "a"))
        store.put("ada", response("c", "b"))
        turns = [Turn(json.dumps([f"in {id}"]), json.dumps([f"out {id}", ""], separators=(",", ":"))) for id in "abc"]
        assert store.chain("ada", "c", 1000) == turns
        store.delete("ada", "a")
        with pytest.raises(ResponseNotFoundError, match="'a' not found"):
            store.chain("ada", "c", 1000)


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_items_come_back_as_they_were_whatever_their_text(given_items: list[str], output: list[str]) -> None:
    with opened() as store:
        text = json.dumps({"output": [*output, {"text": output}]}, ensure_ascii=False)
        store.put("ada", StoredResponse("a", None, json.dumps(given_items, ensure_ascii=False), text))
        [turn] = store.chain("ada", "a", 10**6)
        assert (json.loads(turn.input), json.loads(turn.output)) == (given_items, [*output, {"text": output}])
        assert store.get("ada", "a") == text


def test_a_conversation_has_a_bound_in_bytes_and_in_responses() -> None:
    with opened(chain=3) as store:
        for number in range(4):
            store.put("ada", response(f"{number}", f"{number - 1}" if number else None))
        size = sum(len(turn.input) + len(turn.output) for turn in store.chain("ada", "2", 1000))
        assert len(store.chain("ada", "2", size)) == 3
        for id, most in (("2", size - 1), ("3", 1000)):
            with pytest.raises(RequestError, match="too long to continue"):
                store.chain("ada", id, most)


def test_a_store_opened_again_goes_on_with_what_it_has(tmp_path: Path) -> None:
    bounds = StoreBounds(owner_bytes=3 * ROW_BYTES)
    ResponseStore(tmp_path / "store", bounds, lambda: 0.0).put("ada", response("a", text="x" * ROW_BYTES))
    again = ResponseStore(tmp_path / "store", bounds, lambda: 1.0)
    assert holds(again, "ada", "a")
    again.put("ada", response("b"))
    assert not holds(again, "ada", "a") and holds(again, "ada", "b")


def test_deleted_texts_are_not_in_the_files(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "store", clock=lambda: 0.0)
    store.put("ada", response("a", text="SECRET" * 500))
    store.delete("ada", "a")
    assert not any(b"SECRET" in file.read_bytes() for file in (tmp_path / "store").iterdir())


def test_a_store_that_cannot_be_read_says_so_and_is_removed_whole(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "store", clock=lambda: 0.0)
    store.put("ada", response("a"))
    store.remove()
    assert not (tmp_path / "store").exists()
    with pytest.raises(UnavailableError, match="cannot be read"):
        store.get("ada", "a")


def test_only_stores_that_nobody_wrote_to_for_a_day_are_stale(tmp_path: Path) -> None:
    ResponseStore(tmp_path / "new").put("ada", response("a"))
    remove_stale(tmp_path)
    assert (tmp_path / "new").exists()
    remove_stale(tmp_path, seconds=-1.0)
    assert not (tmp_path / "new").exists()
