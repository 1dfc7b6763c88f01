"""The folder of a run: what may not change in it, why it ended, and which adapters it keeps."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from mars_ray.data.packed import REPORT_FILE
from mars_ray.data.source_version import version_of
from mars_ray.errors import ConfigError, DivergedError
from mars_ray.training.run_folder import RunFolder
from tests.factories.token_rows import pack_report

BEGUN = {"seed": 3, "data": {"length": 64}, "objective": {"block": 4, "adapter": {"rank": 8}}}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (BEGUN | {"seed": 4}, "seed was 3, now it is 4"),
        (BEGUN | {"data": {"length": 64, "overlong": "truncate"}}, 'data.overlong was not set, now it is "truncate"'),
        (BEGUN | {"objective": {"block": 4, "adapter": None}}, "objective.adapter.rank was 8, now it is not set"),
    ],
)
def test_a_setting_that_changed_is_named(tmp_path: Path, now: dict[str, object], said: str) -> None:
    folder = RunFolder(tmp_path)
    folder.keep_settings(BEGUN)
    folder.check_settings({**BEGUN, "patience": None})
    with pytest.raises(ConfigError) as refused:
        folder.check_settings(now)
    assert said in str(refused.value)


def test_a_data_file_that_changed_is_refused(tmp_path: Path) -> None:
    source, packed = tmp_path / "train.jsonl", tmp_path / "packed"
    source.write_text("one\n")
    packed.mkdir()
    report = pack_report(rows=1, response_tokens=1, length=8, source=version_of(source))
    (packed / REPORT_FILE).write_text(json.dumps(asdict(report)))
    folder = RunFolder(tmp_path / "run")
    folder.check_data(source, packed)
    source.write_text("two\n")
    os.utime(source, (1, 1))  # a coarse clock may give both versions one time
    with pytest.raises(ConfigError, match=r"train\.jsonl has changed since the run in .*/run began"):
        folder.check_data(source, packed)


def test_the_reason_of_a_worker_is_raised_until_the_next_attempt(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.give_up(DivergedError("Step 2 of 9: the loss is nan."))
    assert folder.has_reason
    with pytest.raises(DivergedError, match="Step 2 of 9"):
        folder.raise_reason()
    folder.begin_attempt()
    assert not folder.has_reason
    folder.raise_reason()


def test_a_reason_that_cannot_be_written_down_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DivergedError, match="Step 2 of 9"):
        RunFolder(tmp_path / "file" / "run").give_up(DivergedError("Step 2 of 9: the loss is nan."))


def test_the_best_adapters_of_the_last_two_states_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for steps in (4, 8, 12):
        folder.best(steps).mkdir(parents=True)
    folder.keep_best({8, 12})
    assert {path.name for path in (tmp_path / "best").iterdir()} == {"8", "12"}
