"""Score the answers of a job, measure speed, and write results and report.

Agreement, verdicts on code and speed are cached, so a resumed run does not measure them again.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from mars_ray.adapter.folder import load_adapter
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.core.load import best_device
from mars_ray.engine.options import EngineOptions
from mars_ray.evaluation.metrics import metrics_of, stops_of
from mars_ray.evaluation.prepare import PreparedEvaluation
from mars_ray.evaluation.report_page import Disagreement, disagreements, evaluate_page
from mars_ray.evaluation.results import RESULTS_FILE, Results, SpeedMeasurement, read_model, write_model
from mars_ray.evaluation.scorer import NumberCache, Scorer
from mars_ray.evaluation.settings import AR
from mars_ray.evaluation.speed import measure_speed
from mars_ray.model.checkpoint import Checkpoint, load_model
from mars_ray.model.threads import threads_alone
from mars_ray.model.token_bytes import token_bytes
from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import write_file


def score_and_report(prepared: PreparedEvaluation, rows: Path) -> Results:
    """Score the answers in the folder `rows`, measure speed, and write all results."""
    checkpoint = cache(partial(load_model, prepared.decoding.base, device=best_device()))
    greedy = prepared.options.temperature == 0
    scorer = Scorer(
        checkpoint=checkpoint,
        encoder=ChatEncoder(prepared.tokenizer),
        cache=NumberCache(prepared.folder / "cache.jsonl"),
        agreement=greedy,
    )
    names = [setting.name for setting in prepared.settings]
    scores = scorer.score(rows, prepared.tasks, names, prepared.plan.block)
    results = Results(
        plan=prepared.plan,
        overall={name: metrics_of(scores, name, None, agreement=greedy) for name in names},
        tasks={
            task: {name: metrics_of(scores, name, task, agreement=greedy) for name in names} for task in scores.tasks
        },
        stops={name: stops_of(scores, name) for name in names if name != AR.name},
        speed=_speed(prepared, checkpoint),
    )
    examples = disagreements(scores, prepared.tasks, names, rows, token_bytes(prepared.tokenizer))
    _write(prepared.folder, results, examples)
    return results


def _speed(prepared: PreparedEvaluation, checkpoint: Callable[[], Checkpoint]) -> SpeedMeasurement:
    """Return the speeds that an earlier run measured, or measure them now."""
    path = prepared.folder / "speed.json"
    if path.exists():
        return read_model(path, SpeedMeasurement)
    previous_threads = torch.get_num_threads()
    workers = prepared.options.workers
    model = prepared.decoding.base
    adapter = prepared.decoding.adapter
    # As many threads as a worker has.
    torch.set_num_threads(int(workers.cpus or 0) or threads_alone(model.parameters.total()))
    try:
        measurement = measure_speed(
            checkpoint(),
            prepared.tasks,
            prepared.settings,
            prepared.sampling,
            options=EngineOptions(**workers.tuning),
            adapter=load_adapter(adapter, model.folder) if adapter else None,
        )
    finally:
        torch.set_num_threads(previous_threads)
    write_model(path, measurement)
    return measurement


def _write(folder: AnyPath, results: Results, examples: dict[str, list[Disagreement]]) -> None:
    write_file(folder / "report.html", [evaluate_page(results, examples).encode()])
    write_model(folder / RESULTS_FILE, results)  # written last, so that its presence implies the report
