"""Answers -> results, report and charts.

In:    the work, and the rows its job wrote.
Out:   `results.json`, `report.html`, PNGs; the results.
Never: measures anything a second time: agreement, verdicts on code and speed are kept as they are found.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from mars_ray.batch.output.shards import write_file
from mars_ray.data.chat import ChatEncoder
from mars_ray.evaluation.judging.disagreements import Disagreement, disagreements
from mars_ray.evaluation.judging.figures import figures_of, stops_of
from mars_ray.evaluation.judging.judge import Judge, LazyCheckpoint
from mars_ray.evaluation.kept import KeptNumbers
from mars_ray.evaluation.report.charts import DARK, LIGHT, by_clock, by_forwards, quality_chart, stops_chart
from mars_ray.evaluation.report.page import Picture, evaluate_page
from mars_ray.evaluation.results import RESULTS_FILE, Results, SpeedPass, read_model, write_model
from mars_ray.evaluation.run.speed import measure_speed
from mars_ray.evaluation.run.work import Work
from mars_ray.evaluation.settings import AR
from mars_ray.model.token_bytes import token_bytes


def finish(work: Work, rows: Path) -> Results:
    """Judge the answers in a folder of rows, measure speed, write everything."""
    checkpoint = LazyCheckpoint(work.model, getattr(torch, work.options.dtype))
    greedy = work.options.temperature == 0
    judge = Judge(
        checkpoint=checkpoint,
        encoder=ChatEncoder(work.tokenizer),
        kept=KeptNumbers(work.folder / "judged.jsonl"),
        agreement=greedy,
    )
    names = [setting.name for setting in work.settings]
    judged = judge.judge(rows, work.tasks, names, work.plan.block)
    results = Results(
        plan=work.plan,
        overall={name: figures_of(judged, name, None, agreement=greedy) for name in names},
        tasks={
            task: {name: figures_of(judged, name, task, agreement=greedy) for name in names} for task in judged.tasks
        },
        stops={name: stops_of(judged, name) for name in names if name != AR.name},
        speed=_speed(work, checkpoint),
    )
    spelled = token_bytes(work.tokenizer)
    _write(work.folder, results, disagreements(judged, work.tasks, names, rows, spelled))
    return results


def _speed(work: Work, checkpoint: LazyCheckpoint) -> SpeedPass:
    """Return what an earlier run measured, or measure."""
    path = work.folder / "speed.json"
    if path.exists():
        return read_model(path, SpeedPass)
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, int(work.options.cpus or 1)))  # as the workers have
    try:
        found = measure_speed(
            checkpoint.whole, work.tasks, work.settings, work.sampling, compiled=work.options.compiled
        )
    finally:
        torch.set_num_threads(before)
    write_model(path, found)
    return found


def _write(folder: Path, results: Results, examples: dict[str, list[Disagreement]]) -> None:
    pictures = dict(_pictures(results))
    for name, picture in pictures.items():
        write_file(folder / f"{name}.png", [picture.light])
    write_file(folder / "report.html", [evaluate_page(results, examples, list(pictures.values())).encode()])
    write_model(folder / RESULTS_FILE, results)  # last: who finds it finds the rest


def _pictures(results: Results) -> Iterator[tuple[str, Picture]]:
    """Yield the charts, each with the name of its file."""
    forwards, clock = by_forwards(results), by_clock(results)
    yield (
        "accuracy-forwards",
        Picture(
            title="Accuracy against tokens per forward",
            says="A line joins the settings that none beats; whiskers: spread over seeds, and 95 % interval.",
            light=quality_chart(forwards, "tokens per forward", LIGHT),
            dark=quality_chart(forwards, "tokens per forward", DARK),
        ),
    )
    yield (
        "accuracy-clock",
        Picture(
            title="Accuracy against tokens per second",
            says="The same by the clock; whiskers: spread over rounds, and 95 % interval.",
            light=quality_chart(clock, "tokens per second", LIGHT),
            dark=quality_chart(clock, "tokens per second", DARK),
        ),
    )
    # A setting that never looks ahead stops nowhere.
    stops = {name: each for name, each in results.stops.items() if name.startswith("threshold") and any(each[1:])}
    if stops:
        yield (
            "stops",
            Picture(
                title="Where acceptance stops",
                says="How many tokens a forward gave before confidence fell below the threshold.",
                light=stops_chart(stops, LIGHT),
                dark=stops_chart(stops, DARK),
            ),
        )
