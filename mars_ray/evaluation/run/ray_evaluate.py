"""Evaluate a model: ask on Ray Data workers, score the answers, measure speed, write results and report (shell)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.batch.run.options import GenerateOptions
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.errors import InterruptedRunError
from mars_ray.evaluation.results import Results
from mars_ray.evaluation.run.options import EvaluateOptions
from mars_ray.evaluation.run.prepare import job_rows, keep_plan, prepare_evaluation
from mars_ray.evaluation.run.score_and_report import score_and_report
from mars_ray.model.sources.store import folder_here
from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import write_lines


def evaluate(options: EvaluateOptions) -> Results:
    """Ask every question at every setting, and write `results.json`, `report.html` and charts.

    The same call goes on with an evaluation that was stopped. Raises an `InputError` before any work when something
    given is unusable, `InterruptedRunError` on Ctrl-C, and `RunError` when the work cannot go on.
    """
    prepared = prepare_evaluation(options)
    with _stopped_in_one_line(options.output):
        keep_plan(prepared)
        questions = options.output / "questions.jsonl"
        write_lines(questions, job_rows(prepared))
        generate_files(
            GenerateOptions(
                input=(str(questions),),
                output=prepared.answers,
                model=prepared.options.model,
                adapter=prepared.options.adapter,
                sampling=SamplingParams(temperature=options.temperature),
                decode=DecodeParams(block=prepared.plan.block),
                trace=True,
                retry_errors=True,  # an engine that died last time may live now; a prompt too long costs nothing
                # Compiled steps begin when they are ready, and round differently.
                workers=replace(options.workers, compiled=False),
            )
        )
        return score_and_report(prepared, folder_here(prepared.answers / "rows"))


@contextmanager
def _stopped_in_one_line(folder: AnyPath) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedRunError(f"Stopped; what was done is in {folder}. The same command goes on.") from None
