"""Answers of a job as they are scored, without Ray: what was found before is not found again."""

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mars_ray.data.chat import ChatEncoder
from mars_ray.evaluation import agreement
from mars_ray.evaluation import scorer as scorer_module
from mars_ray.evaluation.scorer import NumberCache, Scorer, Scores, parts_of, read_answers, row_id
from mars_ray.evaluation.tasks import Question, Task
from mars_ray.model.checkpoint import Checkpoint, load_model
from mars_ray.model.folder import open_model
from tests.evaluation.evaluate_samples import question

BUNDLED = open_model("bundled")


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_model(BUNDLED)


def row(asked: Question, setting: str, text: str, tokens: list[int]) -> dict[str, Any]:
    return {
        "id": row_id(asked, setting),
        "text": text,
        "tokens": len(tokens),
        "forwards": 1,
        "token_ids": tokens,
        "accepted": [len(tokens)],
    }


def test_names_of_questions_and_settings_are_found_in_the_id_of_a_row() -> None:
    asked = question(task="a/b c", number=3, seed=1)
    assert parts_of(row_id(asked, "threshold 0.9")) == (asked.name, "threshold 0.9")


def test_what_was_scored_before_needs_no_model(tmp_path: Path, checkpoint: Checkpoint) -> None:
    asked = question(prompt="Add 3 and 4.")
    task = Task(name="a", questions=(asked,), max_tokens=8)
    rows = [row(asked, "ar", "so", [5, 6]), row(asked, "threshold 0.9", " no", [7])]
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows" / "part-0.parquet")

    def score() -> tuple[Scores, int]:
        loads = list[Checkpoint]()

        def load() -> Checkpoint:
            loads.append(checkpoint)
            return checkpoint

        by = Scorer(
            checkpoint=load,
            encoder=ChatEncoder(checkpoint.tokenizer),
            cache=NumberCache(tmp_path / "cache.jsonl"),
            agreement=True,
        )
        return by.score(tmp_path / "rows", [task], ["ar", "threshold 0.9"], 8), len(loads)

    (first, loaded), (second, loaded_again) = score(), score()
    assert (loaded, loaded_again) == (1, 0)
    for setting, right in (("ar", 1), ("threshold 0.9", 0)):
        one, other = first.settings[setting], second.settings[setting]
        assert one.right.tolist() == [right]
        assert one.agreed.tolist() == other.agreed.tolist()


def test_a_stopped_run_keeps_what_it_has_counted(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "POSITIONS_PER_FORWARD", 1)
    monkeypatch.setattr(scorer_module, "KEEP_EVERY", 1)
    asked = question(prompt="Add 3 and 4.")
    (tmp_path / "rows").mkdir()
    rows = [row(asked, "ar", "so", [5, 6]), row(asked, "exact", " no", [7])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows" / "part-0.parquet")
    forwards = itertools.count(1)

    def stop_in_the_second(*_: object) -> None:
        if next(forwards) == 2:
            raise KeyboardInterrupt

    scorer = Scorer(
        checkpoint=lambda: checkpoint,
        encoder=ChatEncoder(checkpoint.tokenizer),
        cache=NumberCache(tmp_path / "cache.jsonl"),
        agreement=True,
    )
    stopping = checkpoint.network.register_forward_pre_hook(stop_in_the_second)
    try:
        with pytest.raises(KeyboardInterrupt):
            scorer.score(tmp_path / "rows", [Task(name="a", questions=(asked,), max_tokens=8)], ["ar", "exact"], 8)
    finally:
        stopping.remove()
    assert len((tmp_path / "cache.jsonl").read_text().split()) == 2  # a key and its count


def test_a_job_without_an_answer_has_no_rows(tmp_path: Path) -> None:
    assert list(read_answers(tmp_path)) == []
