"""Compare three settings on the bundled model: accuracy in one Ray job, and speed on a warm engine, taking turns."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table

from mars_ray.batch.output.report import JobReport
from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.batch.run.options import GenerateOptions, WorkerOptions
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.prompt_file import prompt_of
from mars_ray.data.tasks import is_right_answer
from mars_ray.demo.race import RacePrompt, settings_at
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import SamplingParams
from mars_ray.errors import OutputError
from mars_ray.evaluation.settings import AR, DecodingSetting
from mars_ray.evaluation.speed import TimedPrompt, sample_speed
from mars_ray.measure import Sample, interleaved, speedup
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.progress import ProgressLine
from mars_ray.storage.location import store_errors
from mars_ray.storage.whole_file import write_lines

THRESHOLD = 0.95
SETTINGS = settings_at(THRESHOLD)
SAMPLING = SamplingParams(max_tokens=128)
CALLERS = {1: 24, 16: 96}
"""Prompts per round, keyed by the number of callers, which is the number of prompts decoded together."""
ROUNDS = 3
"""Number of measured rounds, after one warm-up round."""
GAIN = 1.05
"""Minimum speedup over `ar` that counts as a gain; a smaller one may be noise."""
RACED = 4
ANSWERS = "answers"
"""Name of the folder of the job within the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingPace:
    """Speed of a setting at one number of callers."""

    tokens_per_s: float
    times_ar: float
    """Speedup over `ar`, as the median of the rounds."""
    tokens_per_forward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingResult:
    """Accuracy and speeds of one setting."""

    setting: str
    rows: int
    accuracy: float
    """Share of rows whose answer the exact verifier of their family accepts."""
    speeds: dict[int, SettingPace]
    """Speeds by the number of callers."""


def bundled_rows() -> list[dict[str, Any]]:
    """Return the held-out prompts in the package, with fields id, family, prompt, messages and answer."""
    lines = (files("mars_ray") / "assets" / "prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row | {"messages": list(prompt_of(row))} for row in rows]


def raced_prompts() -> list[RacePrompt]:
    """Return a few bundled prompts of different families for the races."""
    texts = [row for row in bundled_rows() if len(row["messages"]) == 1]
    return [RacePrompt(row["id"], row["prompt"]) for row in _evenly(texts, RACED)]


def compare_settings(output: Path) -> tuple[JobReport, list[SettingResult]]:
    """Answer every bundled prompt at every setting in one job that replaces `output`, and then measure speed.

    Raises `OutputError` for an output that is no earlier demo or cannot be written.
    """
    rows = {row["id"]: row for row in bundled_rows()}
    questions = output / "questions.jsonl"
    with store_errors(output, OutputError, "Cannot write to", "Give another --output."):
        if output.exists() and {path.name for path in output.iterdir()} - {questions.name, ANSWERS}:
            raise OutputError(f"{output} has files that do not belong to a demo. Give another --output.")
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True, exist_ok=True)
    write_lines(questions, (_job_row(row, setting) for setting in SETTINGS for row in rows.values()))
    options = GenerateOptions(  # each row sets its own mode and threshold
        input=(str(questions),),
        output=output / ANSWERS,
        sampling=SAMPLING,
        workers=WorkerOptions(),
    )
    report = generate_files(options)
    verdicts: dict[str, list[bool]] = {setting.name: [] for setting in SETTINGS}
    for answer in read_rows(output):
        row = rows[answer["question"]]
        verdicts[answer["setting"]].append(is_right_answer(row["family"], row["answer"], answer["text"]))
    checkpoint = load_checkpoint(resolve_model("bundled"))
    speeds = {
        callers: _speeds(checkpoint, callers, _evenly(list(rows.values()), prompts))
        for callers, prompts in CALLERS.items()
    }
    return report, [
        SettingResult(
            setting=name,
            rows=len(accepted),
            accuracy=sum(accepted) / len(rows),
            speeds={callers: by_setting[name] for callers, by_setting in speeds.items()},
        )
        for name, accepted in verdicts.items()
    ]


def show_comparison(report: JobReport, results: Sequence[SettingResult], console: Console) -> None:
    """Print a table of the settings for each number of callers."""
    caption = (
        f"Medians of {ROUNDS} rounds in turns on a warm engine. The job of {report.rows} rows "
        f"decoded {report.tokens_per_s:,.0f} tokens/s over all settings."
    )
    caption = " ".join([caption, *notes(results)])
    table = Table(title="The bundled model on this machine", caption=caption, caption_justify="left")
    for column in ("callers", "setting", "tokens/s", "times ar", "tokens per forward", "exact match"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for callers in CALLERS:
        for result in results:
            speed = result.speeds[callers]
            table.add_row(
                f"{callers}",
                result.setting,
                f"{speed.tokens_per_s:,.0f}",
                f"{speed.times_ar:.2f}",
                f"{speed.tokens_per_forward:.2f}",
                f"{result.accuracy:.1%}",
            )
        table.add_section()
    console.print(table)


def notes(results: Sequence[SettingResult]) -> list[str]:
    """Return one explanation for each setting that is no faster than `ar`."""
    return [
        f"{result.setting} gains nothing with {callers} at a time: it gives {speed.tokens_per_forward:.2f} tokens per "
        "forward, but each position in a forward takes time, and for a model this small nearly all of the time of a "
        "batch is spent on positions."
        for result in results
        for callers, speed in result.speeds.items()
        if result.setting != AR.name and speed.times_ar < GAIN
    ]


def read_rows(output: Path) -> list[dict[str, Any]]:
    """Return the rows of answers that the job wrote."""
    rows: list[dict[str, Any]] = pq.read_table(output / ANSWERS / "rows").to_pylist()
    return rows


def _job_row(row: Mapping[str, Any], setting: DecodingSetting) -> str:
    return json.dumps(
        {
            "id": f"{row['id']}, {setting.name}",
            "question": row["id"],
            "setting": setting.name,
            "messages": row["messages"],
            "mode": setting.mode.value,
            "threshold": setting.threshold,
        }
    )


def _speeds(checkpoint: Checkpoint, callers: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, SettingPace]:
    """Answer the rows with each setting in turn, on an engine that decodes `callers` of them together."""
    torch.set_num_threads(1)  # more threads gain nothing for a model of this size
    encoder = ChatEncoder(checkpoint.tokenizer)
    prompts: list[TimedPrompt] = [(tuple(encoder.prompt(row["messages"])), SAMPLING) for row in rows]
    engine = Engine(checkpoint, EngineOptions(max_num_seqs=callers))
    try:
        candidates = {setting.name: partial(sample_speed, engine, prompts, setting) for setting in SETTINGS}
        with ProgressLine(f"measure, {callers} at a time", total=len(SETTINGS) * (ROUNDS + 1)) as progress:
            samples = interleaved(candidates, ROUNDS, progress)
    finally:
        engine.close()
    return {name: _pace(rounds, samples[AR.name]) for name, rounds in samples.items()}


def _evenly(rows: Sequence[dict[str, Any]], count: int) -> Sequence[dict[str, Any]]:
    """Return `count` evenly spaced rows, so that they come from different families."""
    return rows[:: max(1, len(rows) // count)][:count]


def _pace(rounds: Sequence[Sample], ar: Sequence[Sample]) -> SettingPace:
    return SettingPace(
        tokens_per_s=median(sample.tokens_per_s for sample in rounds),
        times_ar=speedup(rounds, ar).median,
        tokens_per_forward=sum(sample.tokens for sample in rounds) / sum(sample.forwards for sample in rounds),
    )
