"""Let a model answer prompts, to train on these answers instead of references (arXiv 1606.07947).

The answers of one model vary less than references, so a model trained on them is more certain of the next tokens.
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
    """Answer the prompts of a file one token at a time with `generate` (Ray Data), which resumes in `answers`.

    Returns the rows in order of id, without answers cut at `max_tokens` unless `keep_cut` is set. The column `text` is
    the answer; the other columns come from the prompts.
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
