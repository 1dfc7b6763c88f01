"""Make the requests of a benchmark: bundled prompts, with the lengths of the bundled model's answers.

Networks with random weights get the same prompts; the ids are valid in any larger vocabulary.
"""

import json
import random
from collections import defaultdict
from dataclasses import dataclass

from benchmarks.decode.script import autoregressive_outputs
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.prompt_file import prompt_of
from mars_ray.data.records import Message
from mars_ray.errors import ConfigError
from mars_ray.load.plan import bundled_prompts
from mars_ray.model.checkpoint import Checkpoint

OUTPUT_TOKENS_MAX = 128


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival."""

    prompts: list[tuple[int, ...]]
    lengths: list[int]
    """Tokens of each answer, including the stop token."""

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(self.lengths)


def bundled_workload(checkpoint: Checkpoint, requests: int, seed: int) -> Workload:
    """Return `requests` different bundled prompts, balanced over the families, in random order."""
    encoder = ChatEncoder(checkpoint.tokenizer)
    prompts = [tuple(encoder.prompt(messages)) for messages in _spread(requests, random.Random(seed))]
    outputs = autoregressive_outputs(checkpoint, prompts, OUTPUT_TOKENS_MAX)
    return Workload(prompts, [len(output) for output in outputs])


def _spread(requests: int, random_source: random.Random) -> list[list[Message]]:
    """Draw prompts from the families in turn, then shuffle them."""
    lines = bundled_prompts().read_text(encoding="utf-8").splitlines()
    by_family: dict[str, list[list[Message]]] = defaultdict(list)
    for row in map(json.loads, lines):
        by_family[row["family"]].append(list(prompt_of(row)))
    if not 1 <= requests <= len(lines):
        raise ConfigError(f"requests is {requests}; it must be in 1..{len(lines)}, the number of bundled prompts.")
    for prompts in by_family.values():
        random_source.shuffle(prompts)
    waiting = list(by_family.values())
    random_source.shuffle(waiting)
    selection: list[list[Message]] = []
    while len(selection) < requests:
        selection += [prompts.pop() for prompts in waiting if prompts]
    selection = selection[:requests]
    random_source.shuffle(selection)
    return selection
