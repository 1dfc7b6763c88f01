"""Evaluate a model: answer the questions in a Ray job, score the answers, measure speed, and write the report."""

from dataclasses import replace

from mars_ray.batch.ray.generate_files import run_job
from mars_ray.batch.run.job_plan import plan_job
from mars_ray.batch.run.options import GenerateOptions
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.errors import InterruptedRunError, check_kind
from mars_ray.evaluation.prepare import EvaluateOptions, job_rows, keep_plan, prepare_evaluation
from mars_ray.evaluation.results import Results
from mars_ray.evaluation.score_and_report import score_and_report
from mars_ray.model.sources.store import folder_here
from mars_ray.storage.whole_file import write_lines


def evaluate(options: EvaluateOptions) -> Results:
    """Answer every question at every setting, and write `results.json` and `report.html`.

    The same call resumes a stopped evaluation. Raises an `InputError` before any work for unusable options, tasks or
    models, `InterruptedRunError` on Ctrl-C, and `RunError` if the evaluation cannot continue.
    """
    check_kind("options", options, EvaluateOptions)
    prepared = prepare_evaluation(options)
    try:
        keep_plan(prepared)
        questions = options.output / "questions.jsonl"
        write_lines(questions, job_rows(prepared))
        job = GenerateOptions(
            input=(str(questions),),
            output=prepared.answers,
            model=prepared.options.model,
            adapter=prepared.options.adapter,
            sampling=SamplingParams(temperature=options.temperature),
            decode=DecodeParams(block=prepared.plan.block),
            trace=True,
            retry_errors=True,  # an engine may have died by chance; retrying other errors is cheap
            workers=replace(options.workers, engine="mars"),
        )
        run_job(plan_job(job, prepared.decoding))
        return score_and_report(prepared, folder_here(prepared.answers / "rows"))
    except KeyboardInterrupt:
        raise InterruptedRunError(
            f"Stopped; finished work is in {options.output}. The same command resumes it."
        ) from None
