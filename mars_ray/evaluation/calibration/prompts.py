"""Prompts of a calibration, divided into samples.

Samples of a file have no records in common. Each sample of the task families has its own seed.
"""

from dataclasses import dataclass
from itertools import islice

from mars_ray.data.prompt_file import Conversation, read_prompts
from mars_ray.data.tasks import FAMILIES
from mars_ray.data.tasks.family import TaskExample
from mars_ray.data.tasks.split import examples
from mars_ray.errors import DataError
from mars_ray.storage.location import AnyPath


@dataclass(frozen=True, slots=True)
class CalibrationPrompt:
    """A conversation to answer."""

    name: str
    """Name of the prompt in error messages."""
    sample: int
    messages: Conversation
    example: TaskExample | None = None
    """Task example with the reference answer; None for a prompt from a file."""


def family_prompts(per_family: int, seeds: range) -> list[CalibrationPrompt]:
    """Return the prompts of one sample per seed, each with `per_family` held-out examples of every family."""
    return [
        CalibrationPrompt(f"{example.family}, seed {seed}", sample, example.messages, example)
        for sample, seed in enumerate(seeds)
        for example in heldout_examples(per_family, seed)
    ]


def heldout_examples(per_family: int, seed: int) -> list[TaskExample]:
    """Return `per_family` held-out examples of every family, none of which is a training prompt."""
    return [
        example for family in FAMILIES.values() for example in islice(examples(family, "heldout", seed), per_family)
    ]


def file_prompts(path: AnyPath, per_sample: int | None, samples: int) -> list[CalibrationPrompt]:
    """Deal the prompts of a file to the samples in turn: `per_sample` to each, or all if `per_sample` is None.

    Raises `DataError` if the file has a bad record or fewer prompts than samples.
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
