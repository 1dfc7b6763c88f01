"""A model's own answers, to learn from in place of references (arXiv 1606.07947).

A prompt that has many right answers has one here, so a model that learns from them is surer of what comes next.
"""

from operator import itemgetter
from pathlib import Path

from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.batch.run.options import GenerateOptions, WorkerOptions
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, SamplingParams
from pipelines.pipeline_files import Json, rows_in


def own_answers(
    model: str, prompts: Path, answers: Path, *, max_tokens: int, workers: int | None = None, keep_cut: bool = False
) -> list[Json]:
    """Answer the prompts of a file one token at a time, with `generate` (Ray Data), which resumes in `answers`.

    Returns the rows that were answered to the end, by id; with `keep_cut` those that reached `max_tokens`, too. `text`
    is the answer, beside what the prompts came with.
    """
    generate_files(
        GenerateOptions(
            input=(str(prompts),),
            output=answers,
            model=model,
            sampling=SamplingParams(max_tokens=max_tokens),
            decode=DecodeParams(mode=Mode.AR),
            workers=WorkerOptions(count=workers),
        )
    )
    kept = ("stop", "length") if keep_cut else ("stop",)
    return sorted((row for row in rows_in(answers) if row["finish_reason"] in kept), key=itemgetter("id"))
