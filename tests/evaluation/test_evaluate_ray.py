"""Whole evaluations through Ray Data, judged by the reference decoder; stopped ones that go on."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from upath import UPath

from mars_ray.batch.run.options import WorkerOptions
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.tasks import is_right_answer
from mars_ray.errors import ClusterError, ConfigError, DataError
from mars_ray.evaluation.prepare import EvaluateOptions
from mars_ray.evaluation.ray_evaluate import evaluate
from mars_ray.evaluation.results import RESULTS_FILE, Results, read_model
from mars_ray.evaluation.tasks import TaskOptions, open_tasks
from mars_ray.method.reference import DecodeOptions, decode
from tests.factories.engine import bundled_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]
TASKS = ("sort_numbers", "date_rewrite")
WORKERS = WorkerOptions(count=1)


def options(output: Path, **changes: Any) -> EvaluateOptions:
    given: dict[str, Any] = {"tasks": TASKS, "thresholds": (0.6,), "workers": WORKERS} | changes
    return EvaluateOptions(output=output, questions=TaskOptions(examples=3, seeds=2), **given)


@pytest.fixture(scope="module")
def found(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    output = tmp_path_factory.mktemp("evaluate") / "out"
    return output, evaluate(options(output))


def test_the_figures_are_those_of_the_reference_decoder_one_question_at_a_time(found: tuple[Path, Results]) -> None:
    _, results = found
    oracle = bundled_checkpoint()
    encoder = ChatEncoder(oracle.tokenizer)
    questions = [
        question for task in open_tasks(TASKS, TaskOptions(examples=3, seeds=2)) for question in task.questions
    ]
    for name, threshold in (("ar", 1.0), ("threshold 0.6", 0.6)):
        mode: Literal["ar", "threshold"] = "ar" if name == "ar" else "threshold"
        decoding = DecodeOptions(mode=mode, threshold=threshold, block=16, stop_ids=oracle.stop_ids, max_tokens=256)
        tokens = forwards = right = 0
        for question in questions:
            [answer] = decode(oracle.network, [encoder.prompt(question.messages)], decoding, mask_id=oracle.mask_id)
            tokens, forwards = tokens + len(answer.tokens), forwards + answer.forwards
            text = oracle.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            right += is_right_answer(question.match, question.reference, text)
        figures = results.overall[name]
        assert (figures.examples, figures.unanswered) == (12, 0)
        assert (figures.tokens, figures.forwards, figures.right) == (tokens, forwards, right)
        assert figures.accuracy == pytest.approx(right / 12)


def test_exact_mode_gives_the_answers_of_ar_in_fewer_forwards(found: tuple[Path, Results]) -> None:
    _, results = found
    exact, ar = results.overall["exact"], results.overall["ar"]
    assert (exact.same_answers, exact.agreement, ar.agreement) == (1.0, 1.0, 1.0)
    assert exact.forwards < ar.forwards == ar.tokens


def test_results_and_report_are_whole_files(found: tuple[Path, Results]) -> None:
    output, results = found
    assert read_model(output / RESULTS_FILE, Results) == results
    assert results.speed.machine["torch"]
    assert "/" not in results.plan.model_dump_json()
    assert (output / "report.html").read_text().rstrip().endswith("</html>")
    assert {name: sum(each) for name, each in results.stops.items()} == {
        name: results.overall[name].forwards - 12 for name in ("exact", "threshold 0.6")
    }


def test_the_same_call_finds_the_same_and_measures_nothing_again(found: tuple[Path, Results]) -> None:
    output, results = found
    kept = {name: (output / name).read_bytes() for name in ("cache.jsonl", "speed.json", "report.html")}
    assert evaluate(options(output)) == results
    assert {name: (output / name).read_bytes() for name in kept} == kept


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"thresholds": (0.7,)}, "settings was .*0.6.*, now it is .*0.7"), ({"tasks": TASKS[:1]}, "tasks was")],
)
def test_another_plan_is_refused(found: tuple[Path, Results], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"began with another plan: {message}"):
        evaluate(options(found[0], **changes))


@pytest.fixture(scope="module")
def own_file(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[EvaluateOptions, Results]:
    """An evaluation of a file, into a folder to which a call with another plan came before and was refused."""
    folder, prompt = tmp_path_factory.mktemp("own"), "Sort from smallest to largest: 52, 14, 42, 68, 47"
    rows = [
        {"prompt": prompt, "reference": "14, 42, 47, 52, 68"},
        {"prompt": prompt, "reference": "^14, .*68$", "match": "regex"},
        {"prompt": prompt, "reference": "[1]", "match": "json"},
        {"prompt": "word " * 3000, "reference": "anything"},
    ]
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ClusterError, match="workers with"):
        evaluate(options(folder / "out", workers=replace(WORKERS, count=10_000)))
    asked = EvaluateOptions(
        output=folder / "out",
        tasks=(str(path),),
        questions=TaskOptions(seeds=1),
        modes=("ar",),
        workers=WORKERS,
    )
    return asked, evaluate(asked)


@pytest.mark.slow
def test_a_refused_call_leaves_the_folder_to_another_plan(own_file: tuple[EvaluateOptions, Results]) -> None:
    assert own_file[1].plan.settings == ("ar",)


@pytest.mark.slow
def test_references_of_a_file_judge_and_a_prompt_that_does_not_fit_counts_as_wrong(
    own_file: tuple[EvaluateOptions, Results],
) -> None:
    ar = own_file[1].overall["ar"]
    assert (ar.examples, ar.right, ar.unanswered, ar.accuracy_std) == (4, 2, 1, None)


@pytest.mark.slow
def test_a_file_or_a_plan_that_changed_is_refused(own_file: tuple[EvaluateOptions, Results]) -> None:
    """The last test that uses them."""
    asked, _ = own_file
    path = Path(asked.tasks[0])
    path.write_text(path.read_text().replace("14, 42", "42, 14"))
    with pytest.raises(ConfigError, match="a file, --match or --data has changed"):
        evaluate(asked)
    (asked.output / "plan.json").write_text("{}")
    refusal = r"plan\.json is not a file of an evaluation: model is missing; .*Give another output"
    with pytest.raises(DataError, match=refusal):
        evaluate(asked)


@pytest.mark.slow
def test_a_sampled_evaluation_has_no_agreement_and_exact_still_says_what_ar_says(tmp_path: Path) -> None:
    results = evaluate(options(tmp_path / "out", temperature=1.0, tasks=("sort_numbers",)))
    assert results.overall["ar"].agreement is None
    assert results.overall["exact"].same_answers == 1.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_evaluation_that_is_killed_and_interrupted_ends_with_the_same_figures(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    words = ["--tasks", "sort_numbers,rephrase", "--examples", "300", "--seeds", "2", "--thresholds", ".9,.6"]

    def start(output: Path) -> subprocess.Popen[str]:
        program = [
            sys.executable,
            "-c",
            "from mars_ray.cli.main import main; main()",
            "evaluate",
            *words,
        ]
        return subprocess.Popen([*program, "--output", str(output)], stderr=subprocess.PIPE, text=True)

    def until_rows_are_done(process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        # Lines of progress come every ten seconds; the second that counts rows is in the middle of the work.
        assert any(" tokens/s " in line for line in process.stderr)

    with start(whole) as process:
        process.communicate()
        assert process.returncode == 0
    for number, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        with start(stopped) as process:
            until_rows_are_done(process)
            os.kill(process.pid, number)
            process.communicate()
            assert process.returncode == code
        assert not (stopped / RESULTS_FILE).exists()
    with start(stopped) as process:
        process.communicate()
        assert process.returncode == 0
    assert answers_in(whole) == answers_in(stopped)


def answers_in(folder: Path) -> dict[str, Any]:
    """Everything but speeds, and forwards of exact mode, which looks ahead as far as measured times make it pay."""
    results = read_model(folder / RESULTS_FILE, Results).model_dump(exclude={"speed"})
    del results["stops"]["exact"]  # its forwards, by the tokens that they yielded
    for metrics in (results["overall"], *results["tasks"].values()):
        assert all(metrics["exact"].pop(name) for name in ("forwards", "tokens_per_forward", "tokens_per_forward_std"))
    return results


@pytest.mark.slow
def test_an_evaluation_reads_and_writes_a_store_and_goes_on_there(bucket: UPath) -> None:
    rows = [{"prompt": f"Sort: 3, {number}, 1", "reference": f"1, {number}, 3"} for number in range(2, 4)]
    (bucket / "numbers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = EvaluateOptions(
        output=bucket / "out",
        tasks=(f"{bucket}numbers.jsonl",),
        questions=TaskOptions(seeds=1, max_tokens=8),
        modes=("ar",),
        workers=WORKERS,
    )
    results = evaluate(asked)
    assert results.overall["ar"].examples == 2
    assert read_model(bucket / "out" / RESULTS_FILE, Results) == results
    assert (bucket / "out" / "report.html").read_text().rstrip().endswith("</html>")
    again = evaluate(asked)
    assert again == results
