"""What a model is calibrated on: prompts, each in one of several samples, some with an answer to judge by.

No two samples of a file have a record in common; each sample of the families has its own seed.
"""

from dataclasses import dataclass

from mars_ray.data.prompt_file import Conversation, read_prompts
from mars_ray.data.tasks.family import TaskExample
from mars_ray.errors import DataError
from mars_ray.evaluation.calibration.families import heldout_examples
from mars_ray.storage.location import AnyPath


@dataclass(frozen=True, slots=True)
class CalibrationPrompt:
    """One conversation to go on with."""

    name: str
    """The name that an error gives the prompt."""
    sample: int
    messages: Conversation
    example: TaskExample | None = None
    """What it was made from; None where there is no verifier."""


def family_prompts(per_family: int, seeds: range) -> list[CalibrationPrompt]:
    """Return a sample for each seed, with so many held-out examples of every family."""
    return [
        CalibrationPrompt(f"{each.family}, seed {seed}", sample, ({"role": "user", "content": each.prompt},), each)
        for sample, seed in enumerate(seeds)
        for each in heldout_examples(per_family, seed)
    ]


def file_prompts(path: AnyPath, per_sample: int | None, samples: int) -> list[CalibrationPrompt]:
    """Deal the prompts of a file out to the samples in turn: the first `per_sample` for each of them, or all.

    Raises `DataError` for a file with a bad record, or with fewer prompts than samples.
    """
    prompts = read_prompts(path)
    if len(prompts) < samples:
        raise DataError(f"{path} has too few prompts for {samples} samples: {len(prompts)}. Add some or lower --seeds.")
    if per_sample is not None:
        prompts = prompts[: per_sample * samples]
    return [
        CalibrationPrompt(f"{path}, record {number + 1}", number % samples, messages)
        for number, messages in enumerate(prompts)
    ]
