"""The verdicts and tables of the reproduction; and once, small, the whole of it."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.reproduction import claims
from pipelines.reproduction import figures as figures_module
from pipelines.reproduction.__main__ import Unit, next_unit
from tests.pipelines.test_programs import done

QUESTIONS = 20_000
Row = dict[str, Any]


def row(accuracy: float, ahead: float = 1.0, **more: Any) -> Row:
    right = round(accuracy * QUESTIONS)
    return {"accuracy": accuracy, "tokens_per_forward": ahead, "right": "1" * right + "0" * (QUESTIONS - right)} | more


def decoder(accuracy: float, ahead: float, tokens_per_s: float) -> Row:
    return row(accuracy, ahead, tokens=1000, seconds=[1000 / tokens_per_s] * 3, draft_forwards=500)


def batch(**tokens_per_s: float) -> Row:
    return {name: {"samples": [{"tokens": 100, "seconds": 100 / rate}] * 3} for name, rate in tokens_per_s.items()}


def paper(more: float = 0.0) -> Row:
    """What arXiv 2604.07023 found, and where it says nothing what we hope for; `more` is what this seed has more."""

    def mars(one: float, lost: float, ahead: float) -> Row:
        return {
            "ar": row(one + more),
            "0.95": row(one - lost + more, ahead + more),
            "0.6": row(one - lost - 0.1 + more, ahead + 0.8 + more),
        }

    figures = {
        "ar": {"ar": row(0.287)},
        "ar-longer": {"ar": row(0.264 + more)},
        "mars-4": mars(0.304, 0.014, 1.46),
        "mars-8": mars(0.297, 0.011, 1.49),
        "mars-16": mars(0.297, 0.016, 1.47),
        "mask-only-4": mars(0.284, 0, 1.3),
        "mask-only-8": mars(0.264, 0, 1.3),
        "mask-only-16": mars(0.222, 0, 1.3),
        "diffusion-4": {"one at a time": row(0.228 + more)},
        "metrics": {
            f"{metric} {place}": row(0.297 - place / 100, 1 + place / 5)
            for metric in ("probability", "entropy", "margin")
            for place in (1, 2, 3)
        },
        "memory": {"ar-longer": {"bytes": 1000}, "mars-8": {"bytes": 1500}},
        "baselines": {
            "AR": decoder(0.287, 1, 30),
            "Jacobi": decoder(0.287, 1.07 + more, 30),
            "speculative, AR + AR": decoder(0.287, 3.56 + more, 42),
            "speculative, AR draft, MARS target": decoder(0.287, 4.14 + more, 53.3),
            "speculative, MARS both": decoder(0.287, 4.07 + more, 58.6),
            "engine, AR": decoder(0.297, 1, 40),
            "engine, exact": decoder(0.297, 1.3, 44 + more),
        },
        "caches": {
            "1": batch(ar=40, **{"threshold 0.95": 50}),
            "4": batch(
                ar=160,
                generate=143.4,
                **{"threshold 0.95": 300, "threshold 0.95, eager": 280, "no cache": 127.1},
                **{"block cache 8": 196.0, "block cache 16": 228.5, "block cache 32": 241.9},
            ),
            "16": batch(
                ar=500,
                generate=434.3,
                **{"threshold 0.95": 800, "threshold 0.95, eager": 700, "no cache": 97.7},
                **{"block cache 8": 484.1, "block cache 16": 566.0, "block cache 32": 544.9},
            ),
        },
    }
    for name in ("random-8", "decay-8", "distill-8", "own-8", "random-16"):
        figures[name] = mars(0.297, 0.005, 2.3)
    for name in ("distill-16", "growth-16", "mars-8-long"):
        figures[name] = mars(0.297, 0.005, 2.8)
    figures["best"] = mars(0.297, 0.005, 5.5)
    training = {"ar-longer": {"cpu_s": 170}} | {f"mars-{block}": {"cpu_s": 210} for block in (4, 8, 16)}
    return {"figures": figures, "training": training}


def test_what_the_paper_found_is_that_all_its_claims_hold() -> None:
    seeds = [paper(), paper(0.0002), paper(-0.0002)]
    found = {(each.says, claims.verdict(each, seeds)) for each in (*claims.claims(), *claims.ours())}
    assert {says for says, verdict in found if verdict != "holds"} == set()


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((0.1, 0.12, 0.11), "holds"),
        ((-0.1, -0.12, -0.11), "does not hold"),
        ((0.1, 0.2, 0.9), "cannot tell"),
        ((0.1, -0.1, 0.3), "cannot tell"),
        ((0.1, 0.1, None), "cannot tell"),
        ((0.1,), "cannot tell"),
    ],
)
def test_a_claim_holds_where_chance_does_not_explain_it(differences: tuple[float | None, ...], verdict: str) -> None:
    claim = claims.Claim("it helps", "+1", lambda seed: seed["difference"])
    assert claims.verdict(claim, [{"difference": each} for each in differences]) == verdict


def test_two_accuracies_on_few_questions_differ_by_chance() -> None:
    def seeds(count: int) -> list[Row]:
        # A tenth of the questions is right by one only, two in three of those by the first.
        one, other = "1" * 94 + "0" * 6, "1" * 90 + "0" * 6 + "1" * 4
        pair = {"ar": {"accuracy": 0.94, "right": one * count}, "0.9": {"accuracy": 0.94, "right": other * count}}
        return [{"figures": {"m": pair}}] * 3

    claim = claims.Claim("it helps", "+1", lambda _: 0.02, (("m", "ar"), ("m", "0.9")))
    assert claims.verdict(claim, seeds(1)) == "cannot tell"
    assert claims.verdict(claim, seeds(20)) == "holds"


def test_equal_accuracy_lies_on_the_line_between_two_thresholds() -> None:
    def found(*mars: Row) -> float | None:
        figures = {"ar": {"ar": row(0.8)}, "mars": {str(place): each for place, each in enumerate(mars)}}
        return figures_module.at_equal_accuracy("mars", 0.02)({"figures": figures})

    assert found(row(0.9), row(0.785, 2), row(0.775, 3), row(0.8, 4)) == pytest.approx(2.5)
    assert found(row(0.9), row(0.79, 2)) == 2
    assert found(row(0.7), row(0.9, 2)) is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((1.0, 2.0, 3.0), "2.00 ± 1.00"),
        ((1.0, None, 3.0), "2.00 ± 1.41 (2 of 3 seeds)"),
        ((1.0,), "1.00"),
        ((None, None), "-"),
    ],
)
def test_a_figure_that_some_seeds_lack_says_how_many_have_it(values: tuple[float | None, ...], said: str) -> None:
    seeds = [{"value": value} for value in values]
    assert figures_module.over_seeds(seeds, lambda seed: seed["value"]) == said


@given(st.data())
def test_units_run_in_order_behind_what_they_need_and_alone_where_their_seconds_count(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        units: list[Unit] = []
        for number in range(data.draw(st.integers(1, 8))):
            needs = data.draw(st.lists(st.sampled_from(units), max_size=2)) if units else []
            result, alone = Path(folder, str(number)), data.draw(st.booleans())
            units.append(Unit(result=result, work=dict, needs=tuple(each.result for each in needs), alone=alone))
        left, coming, cores = list(units), list[Unit](), data.draw(st.integers(1, 3))
        while left or coming:
            while unit := next_unit(left, coming, cores):
                assert all(need.exists() for need in unit.needs)
                before = [each for each in left[: left.index(unit)] if all(need.exists() for need in each.needs)]
                assert before == [], "one that could run is passed over"
                left.remove(unit)
                coming.append(unit)
                assert len(coming) <= cores
                assert len(coming) == 1 or not any(each.alone for each in coming)
            ended = coming.pop(data.draw(st.integers(0, len(coming) - 1)))
            ended.result.touch()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(3600)
def test_every_recipe_is_trained_and_every_way_decoded(tmp_path: Path) -> None:
    command = ("--output", tmp_path / "run", "--json", tmp_path / "found.json")
    sizes = ("--base", "bundled", "--seeds", 0, 1, "--examples", 1000, "--per-family", 2)
    done("reproduction", *command, *sizes)
    report = (tmp_path / "found.md").read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    for recipe in found["recipes"]:
        assert f"`{recipe['name']}`" in report
    for title in (
        "What is trained",
        "Ways to decode",
        "Caches",
        "Acceptance metrics",
        "Claims of the paper",
        "Beyond the paper",
    ):
        assert f"## {title}" in report
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("seed-*/*.json")}
    assert len(before) > 2 * len(found["recipes"])
    done("reproduction", *command, *sizes)
    assert {path: path.stat().st_mtime_ns for path in before} == before
