"""Numbers that survive the run that found them."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.evaluation.scorer import NumberCache, cache_key


def test_what_was_kept_is_there_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    NumberCache(path).add([("a", 1), ("b", 0)])
    NumberCache(path).add([("c", 3)])
    found = NumberCache(path)
    assert (found["a"], found["b"], found["c"]) == (1, 0, 3)
    assert "d" not in found


@given(cut=st.integers(0, 40))
def test_a_line_that_was_cut_costs_nothing_but_itself(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "kept.jsonl"
    path.unlink(missing_ok=True)
    NumberCache(path).add([("a", 1), ("b", 2)])
    path.write_bytes(path.read_bytes()[:cut])
    left = {key: number for key, number in (("a", 1), ("b", 2)) if key in NumberCache(path)}
    NumberCache(path).add([("c", 3)])
    found = NumberCache(path)
    assert found["c"] == 3
    assert all(found[key] == number for key, number in left.items())


@given(st.lists(st.text(), min_size=1), st.lists(st.text(), min_size=1))
def test_other_parts_have_another_key(one: list[str], other: list[str]) -> None:
    assert (cache_key(*one) == cache_key(*other)) == (one == other)
