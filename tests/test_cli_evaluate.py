"""What a user gets wrong with `mars-ray evaluate` ends in one line and exit code 2, before any work."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from mars_ray.model.card import CARD_FILE, read_card, write_card
from mars_ray.model.resolve import resolve_model
from tests.samples import Cli


@pytest.fixture
def evaluate(mars_ray: Cli, tmp_path: Path) -> Cli:
    def run(**changes: Any) -> tuple[int, str, str]:
        given = {"tasks": "rephrase", "output": tmp_path / "out", "examples": 1, "seeds": 1} | changes
        words = (word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value))
        return mars_ray("evaluate", *words)

    return run


def refused(evaluate: Cli, output: Path, message: str, **changes: Any) -> None:
    code, out, err = evaluate(**changes)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not output.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": "rephrase,jsn_extract"}, "Did you mean 'json_extract'?"),
        ({"tasks": ","}, "no task given"),
        ({"tasks": "gsm8k", "data": "nowhere"}, "There is no file nowhere/gsm8k/test.jsonl.gz"),
        ({"tasks": "humaneval"}, "--allow-code-execution"),
        ({"model": "bundeld"}, "unknown model 'bundeld'"),
        ({"thresholds": "0.9,x"}, "--thresholds is '0.9,x'"),
        ({"thresholds": "1.5"}, "threshold is 1.5"),
        ({"modes": "ar,trheshold"}, "Did you mean 'threshold'?"),
        ({"temperature": "-1"}, "temperature is -1"),
        ({"seeds": "0"}, "seeds is 0"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(
    evaluate: Cli, tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    refused(evaluate, tmp_path / "out", message, **changes)


def test_a_file_with_a_missing_reference_is_named_with_its_number(evaluate: Cli, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "p", "reference": "r"}\n{"prompt": "q"}\n')
    refused(evaluate, tmp_path / "out", "mine.jsonl, record 2: it has no 'reference'", tasks=path)


def test_an_unknown_way_to_compare_is_named(evaluate: Cli, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "p", "reference": "r"}\n')
    refused(evaluate, tmp_path / "out", "match is 'near', must be one of exact, regex, json", tasks=path, match="near")


def test_a_model_that_was_not_trained_to_look_ahead_says_what_can_be_done(evaluate: Cli, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve_model("bundled"), tmp_path / "model"))
    card = read_card(folder)
    assert card is not None
    write_card(card.model_copy(update={"method": "ar", "block": None, "objective": {}}), folder)
    refused(evaluate, tmp_path / "out", "was not trained to look ahead (its mars.json names no block)", model=folder)
    (folder / CARD_FILE).unlink()
    refused(evaluate, tmp_path / "out", "it can be evaluated only with --modes ar,exact", model=folder)


def test_a_folder_that_holds_something_else_is_refused_and_left_alone(evaluate: Cli, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    code, out, err = evaluate()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "has files that do not belong to an evaluation" in err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
