"""The questions that are asked, and what is said about tasks and files that are none."""

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mars_ray.data.tasks import FAMILIES, is_right_answer
from mars_ray.data.tasks.split import examples
from mars_ray.errors import ConfigError, DataError, EmptyDataError
from mars_ray.evaluation.tasks import Task, TaskOptions, open_tasks
from tests.evaluation.evaluate_samples import references

GOOD = '{"prompt": "p", "reference": "r"}'


def opened(*names: str, **changes: Any) -> tuple[Task, ...]:
    return open_tasks(names, TaskOptions(**changes))  # type: ignore[arg-type]


def test_a_family_has_other_held_out_examples_for_each_seed() -> None:
    [task] = opened("sort_numbers", examples=4, seeds=2)
    assert [(each.seed, each.number) for each in task.questions] == [(s, n) for s in range(2) for n in range(4)]
    for each in task.questions:
        example = list(zip(range(4), examples(FAMILIES["sort_numbers"], "heldout", each.seed), strict=False))
        [found] = [one for number, one in example if number == each.number]
        assert (each.messages[-1]["content"], each.reference) == (found.prompt, found.answer)
        assert is_right_answer(each.match, each.reference, found.response)
    assert len({each.name for each in task.questions}) == 8


def test_no_prompt_is_asked_twice_though_a_family_has_few() -> None:
    [task] = opened("date_rewrite", examples=1000, seeds=3)
    assert len({each.messages[-1]["content"] for each in task.questions}) == len(task.questions) == 3000


def test_a_family_that_has_not_so_many_examples_says_how_many_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mars_ray.data.tasks.split.examples", lambda *_: islice(examples(*_), 5))
    with pytest.raises(ConfigError, match="rephrase has 5 held-out examples, too few for 2 samples of 6"):
        opened("rephrase", examples=6, seeds=2)


def test_more_questions_than_memory_is_for_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="3 samples of 99,999,999 examples are more than the 100,000"):
        opened("rephrase", examples=99_999_999, seeds=3)


def test_families_are_all_of_them_once() -> None:
    tasks = opened("families", "rephrase", examples=1, seeds=1)
    assert [task.name for task in tasks] == list(FAMILIES)


def test_a_file_is_dealt_out_to_the_seeds_in_turn(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"p{n}", "reference": n}) for n in range(7)]
    path = references(tmp_path / "mine.v2.jsonl", *lines)
    [task] = opened(str(path), seeds=3)
    assert task.name == "mine"
    assert [(each.reference, each.seed, each.number) for each in task.questions] == [
        (str(n), n % 3, n // 3) for n in range(7)
    ]
    [fewer] = opened(str(path), seeds=3, examples=1)
    assert fewer.questions == task.questions[:3]


def test_a_record_may_say_how_it_is_compared(tmp_path: Path) -> None:
    path = references(
        tmp_path / "mine.jsonl",
        '{"prompt": "p", "reference": {"a": [1]}, "match": "json"}',
        "",
        '{"messages": [{"role": "user", "content": "q"}], "reference": "^a+$"}',
        '{"prompt": "p", "reference": " 12 ", "match": "exact"}',
    )
    [task] = opened(str(path), seeds=1, match="regex")
    assert [(each.match, each.reference) for each in task.questions] == [
        ("json", '{"a": [1]}'),
        ("regex", "^a+$"),
        ("exact", "12"),
    ]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"prompt": "p"}', "it has no 'reference'"),
        ('{"prompt": "p", "reference": null}', "it has no 'reference'"),
        ('{"reference": "r"}', "it has neither 'prompt' nor 'messages', only \\['reference'\\]"),
        ('{"prompt": " ", "reference": "r"}', "its prompt is empty"),
        (
            '{"messages": [{"role": "assistant", "content": "r"}], "reference": "r"}',
            "its last message is the assistant",
        ),
        (
            '{"prompt": "p", "reference": "r", "match": "near"}',
            "its match is 'near', must be one of exact, regex, json",
        ),
        ('{"prompt": "p", "reference": "(", "match": "regex"}', "its reference is not a regular expression"),
        ('{"prompt": "p", "reference": "a*", "match": "regex"}', "its reference matches every answer"),
        ('{"prompt": "p", "reference": "{", "match": "json"}', "its reference is not JSON"),
        ('{"prompt": "p", "reference": "{\\"a\\": 1, \\"a\\": 2}", "match": "json"}', "its reference .* key twice"),
        pytest.param(
            json.dumps({"prompt": "p", "reference": "[" * 99_999, "match": "json"}),
            "its reference is not JSON",
            id="deep",
        ),
        ('{"prompt": "p", "reference": " "}', "its reference is empty"),
        ('{"prompt": "p", "reference": NaN}', ".*"),
        ('{"prompt": "p", "reference": ["r"]}', "its reference is list"),
        ('{"prompt": "p", "reference": "r"', "it is not JSON"),
    ],
)
def test_a_record_that_cannot_be_judged_is_named_by_file_and_number(tmp_path: Path, bad: str, reason: str) -> None:
    path = references(tmp_path / "mine.jsonl", GOOD, "", bad, GOOD)
    with pytest.raises(DataError, match=f"mine.jsonl, record 2: {reason}"):
        opened(str(path), seeds=1)


def test_an_unknown_task_is_named_with_the_closest_one_and_all_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        opened("jsn_extract")
    assert "'jsn_extract' is neither a task nor a file" in str(caught.value)
    assert "Did you mean 'json_extract'?" in str(caught.value)
    assert all(name in str(caught.value) for name in (*FAMILIES, "families", "gsm8k", "humaneval"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("families", {"seeds": 0}, "seeds is 0"),
        ("families", {"examples": 0}, "examples is 0"),
        ("families", {"max_tokens": 0}, "max_tokens is 0"),
        ("humaneval", {}, "--allow-code-execution"),
        ("gsm8k", {}, "gsm8k needs --data, the folder with gsm8k/"),
    ],
)
def test_what_is_out_of_range_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(name, **changes)


def test_no_task_is_an_error_that_lists_them() -> None:
    with pytest.raises(ConfigError, match="no task given; choose from json_extract"):
        opened()


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    paths = [references(folder / "mine.jsonl", GOOD) for folder in (tmp_path, tmp_path / "b")]
    with pytest.raises(ConfigError, match="two tasks have the name 'mine'"):
        opened(*map(str, paths), seeds=1)


def test_too_few_records_for_the_seeds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too few records for 3 seeds: 1"):
        opened(str(references(tmp_path / "mine.jsonl", GOOD)), seeds=3)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmptyDataError, match="has no record"):
        opened(str(references(tmp_path / "mine.jsonl", "")), seeds=1)


def test_a_benchmark_that_is_not_there_is_named_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no file .*/gsm8k/test.jsonl.gz; .* --data"):
        opened("gsm8k", data=tmp_path)


def test_gsm8k_compares_the_number_behind_the_marks(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    rows = [{"question": "q", "answer": "2 + 3 = 5\n#### 1,205"}, {"question": "r", "answer": "#### -3"}]
    with gzip.open(tmp_path / "gsm8k" / "test.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    [task] = opened("gsm8k", data=tmp_path, seeds=2)
    assert [(each.reference, each.match) for each in task.questions] == [("1,205", "number"), ("-3", "number")]


@pytest.mark.parametrize(
    ("file", "record", "says"),
    [
        ("gsm8k/test.jsonl.gz", {"question": "q", "answer": "five"}, "its answer has no number after ####"),
        (
            "humaneval/HumanEval.jsonl.gz",
            {"prompt": "def f():", "test": "t", "entry_point": "g"},
            "its prompt does not define its entry_point, g",
        ),
    ],
)
def test_a_damaged_benchmark_is_named_by_record(tmp_path: Path, file: str, record: dict[str, str], says: str) -> None:
    path = tmp_path / file
    path.parent.mkdir()
    with gzip.open(path, "wt") as lines:
        lines.write(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=f"record 1: {says}"):
        opened(path.parent.name, data=tmp_path, seeds=1, allow_code_execution=True)


def test_max_tokens_is_each_tasks_own_unless_it_is_given(tmp_path: Path) -> None:
    assert opened("rephrase", examples=1, seeds=1)[0].max_tokens == 256
    assert opened("rephrase", examples=1, seeds=1, max_tokens=9)[0].max_tokens == 9
