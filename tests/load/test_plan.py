"""The requests of a plan are those of its seed, and as large as the trace says."""

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.data.prompt_file import Conversation, read_prompts
from mars_ray.errors import ConfigError, DataError, EmptyDataError
from mars_ray.load.arrivals import Poisson, Scales, TraceRow
from mars_ray.load.plan import Texts, bundled_prompts, closed_loop, conversations, poisson, replay

PROMPTS: list[Conversation] = [
    ({"role": "system", "content": "be brief"}, {"role": "user", "content": "a b"}),
    ({"role": "user", "content": "c d e"},),
    ({"role": "user", "content": "f"},),
]
ROWS = [TraceRow(0.0, 10, 4), TraceRow(2.0, 3, 100), TraceRow(6.0, 0, 0)]


def test_a_closed_loop_has_no_arrivals_and_draws_every_prompt_before_any_comes_again() -> None:
    plan = closed_loop(PROMPTS, 0, 7, 16)
    requests = list(plan.requests)
    assert (len(requests), plan.total) == (7, 7)
    assert {(each.scheduled_s, each.max_tokens) for each in requests} == {(None, 16)}
    for turn in (requests[:3], requests[3:6]):
        assert sorted(str(each.messages) for each in turn) == sorted(map(str, PROMPTS))


def test_a_closed_loop_without_a_number_never_ends() -> None:
    plan = closed_loop(PROMPTS, 0, None, 16)
    assert plan.total is None
    assert len(list(islice(plan.requests, 1000))) == 1000


def test_arrivals_at_a_rate_end_with_the_number_or_the_time_whichever_is_first() -> None:
    assert len(list(poisson(Poisson(10.0), PROMPTS, 0, 20, None, 16).requests)) == 20
    in_time = list(poisson(Poisson(10.0), PROMPTS, 0, None, 3.0, 16).requests)
    assert len(in_time) > 5
    assert all(each.scheduled_s is not None and each.scheduled_s < 3.0 for each in in_time)
    assert list(poisson(Poisson(10.0), PROMPTS, 0, 4, 3.0, 16).requests) == in_time[:4]


def test_a_seed_gives_the_same_plan_and_another_gives_another() -> None:
    prompts = read_prompts(bundled_prompts())

    def plans(seed: int) -> list[object]:
        return [
            list(closed_loop(prompts, seed, 30, 16).requests),
            list(poisson(Poisson(10.0), prompts, seed, 30, None, 16).requests),
            list(replay(ROWS, Scales(), prompts, seed, None, None, None).requests),
        ]

    def arrivals(seed: int) -> list[float | None]:
        return [each.scheduled_s for each in poisson(Poisson(10.0), prompts, seed, 30, None, 16).requests]

    assert arrivals(0) != arrivals(1)
    assert plans(0) == plans(0)
    assert all(one != other for one, other in zip(plans(0), plans(1), strict=True))


def test_a_trace_is_scaled_in_time_prompt_and_answer_and_nothing_is_smaller_than_one() -> None:
    scales = Scales(speed=4.0, prompt=0.5, output=0.25)
    requests = list(replay(ROWS, scales, PROMPTS, 0, None, None, None).requests)
    assert [each.scheduled_s for each in requests] == [0.0, 0.5, 1.5]
    assert [len(each.messages[0]["content"].split()) for each in requests] == [5, 2, 1]
    assert [each.max_tokens for each in requests] == [1, 25, 1]


def test_a_trace_is_cut_by_number_by_time_after_speed_and_its_answers_by_max_tokens() -> None:
    def planned(**cut: Any) -> list[int]:
        wanted = {"requests": None, "duration_s": None, "max_tokens": None, **cut}
        plan = replay(ROWS, Scales(speed=2.0), PROMPTS, 0, **wanted)  # type: ignore[arg-type]
        requests = list(plan.requests)
        assert plan.total == len(requests)
        return [each.max_tokens for each in requests]

    assert planned() == [4, 100, 1]
    assert planned(requests=2) == [4, 100]
    assert planned(duration_s=2.0) == [4, 100]
    assert planned(max_tokens=50) == [4, 50, 1]


def test_a_scale_that_makes_a_prompt_too_long_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"prompt_scale is 1000000\.0; it makes a prompt of 10,000,000 words"):
        replay(ROWS, Scales(prompt=1e6), PROMPTS, 0, None, None, None)


@given(lengths=st.lists(st.integers(1, 40), max_size=6), seed=st.integers())
def test_texts_have_the_length_asked_for_and_words_of_the_prompts(lengths: list[int], seed: int) -> None:
    made = Texts(PROMPTS, random.Random(seed))
    for length in lengths:
        words = made.of(length).split()
        assert len(words) == length
        assert set(words) <= {"be", "brief", *"abcdef"}


def test_bundled_prompts_are_read_as_generate_reads_them() -> None:
    rows = [json.loads(line) for line in bundled_prompts().read_text().splitlines()]
    written = [row.get("messages") or [{"role": "user", "content": row["prompt"]}] for row in rows]
    assert read_prompts(bundled_prompts()) == [tuple(messages) for messages in written]


def test_prompts_may_be_conversations(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in PROMPTS))
    assert read_prompts(path) == PROMPTS
    assert next(conversations(read_prompts(path), random.Random(0))) in PROMPTS


@pytest.mark.parametrize(
    "bad", ['{"question": "a"}', '{"prompt": 7}', '{"prompt": " "}', "{", '{"messages": []}', '{"prompt": "\\ud800"}']
)
def test_a_bad_prompt_is_named_by_its_place(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + bad)
    with pytest.raises(DataError, match=r"prompts\.jsonl, record 2: "):
        read_prompts(path)


def test_a_file_without_prompts_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n")
    with pytest.raises(EmptyDataError, match=r"prompts\.jsonl holds no prompt"):
        read_prompts(path)
    with pytest.raises(DataError, match="There is no file"):
        read_prompts(tmp_path / "none.jsonl")
