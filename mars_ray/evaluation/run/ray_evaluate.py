"""Evaluate a model: ask on Ray Data workers, judge, measure speed, write results and report (shell)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mars_ray.batch.output.shards import write_lines
from mars_ray.batch.ray.generate_files import GenerateOptions, generate_files
from mars_ray.batch.rows.plain_form import PlainSettings
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.errors import InterruptedRunError
from mars_ray.evaluation.results import Results
from mars_ray.evaluation.run.finish import finish
from mars_ray.evaluation.run.work import EvaluateOptions, agree, prepare, rows_of


def evaluate(options: EvaluateOptions) -> Results:
    """Ask every question at every setting, and write `results.json`, `report.html` and charts.

    The same call goes on with an evaluation that was stopped. Raises an `InputError` before any work when something
    given is unusable, `InterruptedRunError` on Ctrl-C, and `RunError` when the work cannot go on.
    """
    work = prepare(options)
    with _stopped_in_one_line(options.output):
        agree(work)
        questions = options.output / "questions.jsonl"
        write_lines(questions, rows_of(work))
        generate_files(
            GenerateOptions(
                input=(str(questions),),
                output=work.answers,
                model=options.model,
                form=PlainSettings(
                    sampling=SamplingParams(temperature=options.temperature),
                    decode=DecodeParams(block=work.plan.block),
                    trace=True,
                ),
                retry_errors=True,  # an engine that died last time may live now; a prompt too long costs nothing
                workers=options.workers,
                cpus=options.cpus,
                gpus=options.gpus,
                dtype=options.dtype,
                compiled=False,  # compiled steps begin when they are ready, and round differently
            )
        )
        return finish(work, work.answers / "rows")


@contextmanager
def _stopped_in_one_line(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedRunError(f"Stopped; what was done is in {folder}. The same command goes on.") from None
