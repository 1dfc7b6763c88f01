"""What `pipelines/reproduce.py` says of its figures; and once, small, the whole of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PIPELINES = Path(__file__).parents[2] / "pipelines"


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(PIPELINES)
    import reproduce_claims

    yield reproduce_claims


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((0.1, 0.2, 0.3), "holds"),
        ((-0.1, -0.2), "does not hold"),
        ((0.1, -0.1, 0.3), "cannot tell"),
        ((0.1, 0.0), "cannot tell"),
        ((0.1,), "cannot tell"),
    ],
)
def test_a_claim_holds_where_it_does_in_every_seed(
    claims: ModuleType, differences: tuple[float, ...], verdict: str
) -> None:
    claim = claims.Claim("it helps", "+1", lambda seed: seed["difference"])
    assert claims.verdict(claim, [{"difference": each} for each in differences]) == verdict


def test_equal_accuracy_is_that_of_the_ar_model_of_the_same_seed_but_one_point(claims: ModuleType) -> None:
    import reproduce_figures

    def row(accuracy: float, ahead: float) -> dict[str, float]:
        return {"accuracy": accuracy, "tokens_per_forward": ahead}

    figures = {"ar": {"ar": row(0.8, 1)}, "mars": {"ar": row(0.9, 1), "0.9": row(0.795, 2), "0.5": row(0.785, 3)}}
    assert reproduce_figures.free("mars")({"figures": figures}) == 2
    figures["mars"] = {"ar": row(0.7, 1)}
    assert reproduce_figures.free("mars")({"figures": figures}) == 0


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(3600)
def test_every_recipe_is_trained_and_every_way_decoded(tmp_path: Path) -> None:
    from test_pipelines_programs import done

    command = ("--output", tmp_path / "run", "--json", tmp_path / "found.json")
    sizes = ("--base", "bundled", "--seeds", 0, 1, "--examples", 1000, "--per-family", 2)
    done("reproduce", *command, *sizes)
    report = (tmp_path / "found.md").read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    for recipe in found["recipes"]:
        assert f"`{recipe['name']}`" in report or recipe["kind"] == "medusa"
    for title in ("What is trained", "Ways to decode", "Caches", "Acceptance metrics", "Claims"):
        assert f"## {title}" in report
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("seed-*/*.json")}
    assert len(before) > 2 * len(found["recipes"])
    done("reproduce", *command, *sizes)
    assert {path: path.stat().st_mtime_ns for path in before} == before
