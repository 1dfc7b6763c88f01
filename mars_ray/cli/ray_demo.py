"""The first look: the bundled model at three settings, as a job and in turns on a warm engine (shell)."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from mars_ray.batch.output.shards import write_lines
from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.batch.run.options import GenerateOptions, WorkerOptions
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.tasks import is_right_answer
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import decode_all
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import Request, SamplingParams
from mars_ray.evaluation.run.speed import TimedPrompt, sample_speed
from mars_ray.evaluation.settings import AR, EXACT, DecodingSetting
from mars_ray.measure import Sample, interleaved, speedup
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.progress import ProgressLine

SETTINGS = (AR, EXACT, DecodingSetting(mode=Mode.THRESHOLD, threshold=0.95))
SAMPLING = SamplingParams(max_tokens=128)
CALLERS = {1: 24, 16: 96}
"""How many ask at a time, and prompts of a round."""
ROUNDS = 3
"""Rounds that are measured, behind one that warms up."""
GAIN = 1.05
"""Times as fast as `ar` is a gain; less may be noise."""
SHOWN_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSpeed:
    """A setting with so many callers, on a warm engine."""

    tokens_per_s: float
    times_ar: float
    """How many times as fast as `ar`: the median of the ratios, each of one round."""
    tokens_per_forward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """What one setting gave."""

    setting: str
    rows: int
    accuracy: float
    """Share of the rows that the exact verifier of their family accepts."""
    speeds: dict[int, DemoSpeed]
    """Speeds by the number of callers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoAnswer:
    """An answer to one caller who has the engine alone, at the last setting."""

    id: str
    prompt: str
    text: str
    tokens: int
    forwards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """The result of the demo."""

    report: JobReport
    rows: tuple[DemoRow, ...]
    answers: tuple[DemoAnswer, ...]


def demo(output: Path) -> Demo:
    """Answer every bundled prompt at every setting in one job, replacing what lies in `output`; then measure speed."""
    prompts = Path(str(files("mars_ray") / "assets" / "prompts.jsonl"))
    expected = {row["id"]: row for row in map(json.loads, prompts.read_text().splitlines())}
    shutil.rmtree(output, ignore_errors=True)
    questions = output / "questions.jsonl"
    questions.parent.mkdir(parents=True)
    write_lines(questions, (_asked(row, setting) for setting in SETTINGS for row in expected.values()))
    options = GenerateOptions(  # rows name their own mode and threshold
        input=(str(questions),),
        output=output / "answers",
        sampling=SAMPLING,
        workers=WorkerOptions(compiled=False),
    )
    report = generate_files(options)
    answers: dict[str, list[bool]] = {each.name: [] for each in SETTINGS}
    for row in read_rows(output):
        wanted = expected[row["question"]]
        answers[row["setting"]].append(is_right_answer(wanted["family"], wanted["answer"], row["text"]))
    checkpoint = load_checkpoint(resolve_model("bundled"))
    speeds = {
        callers: _speeds(checkpoint, callers, count, list(expected.values())) for callers, count in CALLERS.items()
    }
    return Demo(
        report=report,
        answers=answers_alone(checkpoint, list(expected.values())),
        rows=tuple(
            DemoRow(
                setting=name,
                rows=len(right),
                accuracy=sum(right) / len(expected),
                speeds={callers: of_setting[name] for callers, of_setting in speeds.items()},
            )
            for name, right in answers.items()
        ),
    )


def _asked(row: Mapping[str, Any], setting: DecodingSetting) -> str:
    return json.dumps(
        {
            "id": f"{row['id']}, {setting.name}",
            "question": row["id"],
            "setting": setting.name,
            "prompt": row["prompt"],
            "mode": setting.mode.value,
            "threshold": setting.threshold,
        }
    )


def _speeds(
    checkpoint: Checkpoint, callers: int, count: int, rows: Sequence[Mapping[str, Any]]
) -> dict[str, DemoSpeed]:
    """Answer prompts of all families with every setting in turns, on an engine that decodes `callers` together."""
    torch.set_num_threads(1)  # more gains nothing for a model so small
    prompts: list[TimedPrompt] = [(each, SAMPLING) for each in _encoded(checkpoint, _spread(rows, count))]
    engine = _engine(checkpoint, callers)
    try:
        candidates = {each.name: partial(sample_speed, engine, prompts, each) for each in SETTINGS}
        with ProgressLine(f"measure, {callers} at a time", total=len(SETTINGS) * (ROUNDS + 1)) as progress:
            samples = interleaved(candidates, ROUNDS, progress)
    finally:
        engine.close()
    return {name: _speed(rounds, samples[AR.name]) for name, rounds in samples.items()}


def answers_alone(checkpoint: Checkpoint, rows: Sequence[Mapping[str, Any]]) -> tuple[DemoAnswer, ...]:
    """Answer a few prompts one after the other: with the engine to itself a caller sees how far it looks ahead."""
    chosen, engine = _spread(rows, SHOWN_ROWS), _engine(checkpoint, callers=1)
    try:
        requests = [
            Request(id=row["id"], prompt=prompt, sampling=SAMPLING, decode=SETTINGS[-1].decode)
            for row, prompt in zip(chosen, _encoded(checkpoint, chosen), strict=True)
        ]
        prompts = {row["id"]: row["prompt"] for row in chosen}
        return tuple(
            DemoAnswer(
                id=each.request.id,
                prompt=prompts[each.request.id],
                text=each.text,
                tokens=len(each.tokens),
                forwards=each.forwards,
            )
            for each in decode_all(engine, requests)
        )
    finally:
        engine.close()


def _engine(checkpoint: Checkpoint, callers: int) -> Engine:
    # Compiling steps takes longer than all of this; whether they are ready must not differ between rounds.
    return Engine(checkpoint, EngineOptions(max_num_seqs=callers, compiled=False))


def _encoded(checkpoint: Checkpoint, rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, ...]]:
    encoder = ChatEncoder(checkpoint.tokenizer)
    return [tuple(encoder.prompt([{"role": "user", "content": row["prompt"]}])) for row in rows]


def _spread(rows: Sequence[Mapping[str, Any]], count: int) -> Sequence[Mapping[str, Any]]:
    """Return `count` rows at equal distances, so that all families are among them."""
    return rows[:: max(1, len(rows) // count)][:count]


def _speed(rounds: Sequence[Sample], ar: Sequence[Sample]) -> DemoSpeed:
    return DemoSpeed(
        tokens_per_s=median(each.tokens_per_s for each in rounds),
        times_ar=speedup(rounds, ar).median,
        tokens_per_forward=sum(each.tokens for each in rounds) / sum(each.forwards for each in rounds),
    )


def show_demo(done: Demo, output: Path) -> None:
    """Print the comparison and a few of the generated rows."""
    table = Table(title="The bundled model on this machine", caption=_caption(done), caption_justify="left")
    for column in ("callers", "setting", "tokens/s", "times ar", "tokens per forward", "exact match"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for callers in CALLERS:
        for row in done.rows:
            speed = row.speeds[callers]
            table.add_row(
                f"{callers}",
                row.setting,
                f"{speed.tokens_per_s:,.0f}",
                f"{speed.times_ar:.2f}",
                f"{speed.tokens_per_forward:.2f}",
                f"{row.accuracy:.1%}",
            )
        table.add_section()
    console = Console()
    console.print(table)
    console.print(f"\nOne caller, {SETTINGS[-1].name}:")
    for each in done.answers:
        console.print(f"\n[bold]{each.id}[/bold]  {each.tokens} tokens in {each.forwards} forwards")
        console.print(each.prompt, style="dim", markup=False, highlight=False)
        console.print(each.text, markup=False, highlight=False)
    console.print(f"\nAll rows: {output / 'answers'}", highlight=False)


def _caption(done: Demo) -> str:
    report = done.report
    said = [
        f"Median of {ROUNDS} rounds in turns on a warm engine, steps not compiled. The job that gave the "
        f"{report.rows} rows did {report.tokens_per_s:,.0f} tokens/s, all settings together."
    ]
    return " ".join([*said, *notes(done.rows)])


def notes(rows: Sequence[DemoRow]) -> list[str]:
    """Return why a setting gains nothing, for each that does not."""
    found = []
    for row in rows:
        for callers, speed in row.speeds.items():
            if row.setting != AR.name and speed.times_ar < GAIN:
                found.append(
                    f"{row.setting} gains nothing with {callers} at a time: it gives {speed.tokens_per_forward:.2f} "
                    "tokens per forward, but each position looked at takes time, and in a batch of so small a model "
                    "that is what a step is made of."
                )
    return found


def read_rows(output: Path) -> list[dict[str, Any]]:
    """Return what the job wrote."""
    rows: list[dict[str, Any]] = pq.read_table(output / "answers" / "rows").to_pylist()
    return rows


def demo_json(done: Demo) -> str:
    """Return the comparison as one line."""
    return json.dumps(asdict(replace(done, report=replace(done.report, pace=(), samples=()))))
