"""A model's own answers, to learn from in place of references: prompts -> conversations (arXiv 1606.07947).

A prompt that has many right answers has one here, so a model that learns from them is surer of what comes next.
"""

from pathlib import Path

from pipeline_files import conversation, rows_in, write

from mars_ray.batch.plain_form import PlainSettings
from mars_ray.batch.ray_generate import GenerateOptions, generate
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, SamplingParams


def own_answers(model: Path, prompts: Path, folder: Path, *, max_tokens: int, workers: int) -> Path:
    """Answer the prompts of a file one token at a time, with `generate` (Ray Data), which resumes.

    Returns `folder/own.jsonl`, as `mars-ray train` reads it: what was answered to the end.
    """
    conversations = folder / "own.jsonl"
    if not conversations.exists():
        form = PlainSettings(sampling=SamplingParams(max_tokens=max_tokens), decode=DecodeParams(mode=Mode.AR))
        answers = folder / "answers"
        generate(GenerateOptions(input=(str(prompts),), output=answers, model=str(model), form=form, workers=workers))
        ended = (row for row in rows_in(answers) if row["finish_reason"] == "stop")
        write(conversations, (conversation(row["prompt"], row["text"]) for row in ended))
    return conversations
