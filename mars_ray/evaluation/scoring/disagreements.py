"""Choose answers that differ from autoregressive decoding, so that the report can show them token by token.

Answers that became wrong come first, spread over the tasks.
"""

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np

from mars_ray.evaluation.scoring.scorer import Row, read_answers, row_id
from mars_ray.evaluation.scoring.scores import Scores
from mars_ray.evaluation.settings import AR
from mars_ray.evaluation.tasks.registry import Question, Task

EXAMPLES = 3
"""Maximum number of examples per setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """One token of an answer in the report."""

    text: str
    forward: int
    """Index of the forward that gave the token, from 0."""
    same: bool
    """True if autoregressive decoding has the same token at this position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAnswer:
    """An answer in the report, with its tokens."""

    right: bool
    tokens: int
    forwards: int
    tokens_shown: tuple[ShownToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A question, and the answers to it by `ar` and by another setting."""

    question: Question
    ar: ShownAnswer
    other: ShownAnswer


def disagreements(
    scores: Scores, tasks: Sequence[Task], settings: Sequence[str], folder: Path, token_bytes: Sequence[bytes]
) -> dict[str, list[Disagreement]]:
    """Return the examples to show for each setting; settings without examples are left out."""
    questions = [question for task in tasks for question in task.questions]
    indices = {setting: _choose(scores, setting) for setting in settings if setting != AR.name}
    ids = {
        row_id(questions[number], name)
        for setting, numbers in indices.items()
        for number in numbers
        for name in (setting, AR.name)
    }
    rows = {row["id"]: row for batch in read_answers(folder, ids) for row in batch} if ids else {}
    return {
        setting: [_shown(scores, questions[number], number, setting, rows, token_bytes) for number in numbers]
        for setting, numbers in indices.items()
        if numbers
    }


def _choose(scores: Scores, setting: str) -> list[int]:
    """Return the indices of the questions to show."""
    column = scores.settings[setting]
    ar = scores.settings[AR.name]
    differs = column.answered & ar.answered & (column.key != ar.key)
    change = column.right - ar.right
    indices: list[int] = []
    for verdict in (change < 0, change > 0, change == 0):
        by_task = [np.flatnonzero(differs & verdict & (scores.task == task)) for task in range(len(scores.tasks))]
        in_turns = chain.from_iterable(zip_longest(*(numbers[:EXAMPLES] for numbers in by_task)))
        indices += [int(number) for number in in_turns if number is not None]
    return indices[:EXAMPLES]


def _shown(
    scores: Scores,
    question: Question,
    number: int,
    setting: str,
    rows: Mapping[str, Row],
    token_bytes: Sequence[bytes],
) -> Disagreement:
    ar_row = rows[row_id(question, AR.name)]
    setting_row = rows[row_id(question, setting)]

    def shown(row: Row, name: str) -> ShownAnswer:
        return ShownAnswer(
            right=bool(scores.settings[name].right[number]),
            tokens=row["tokens"],
            forwards=row["forwards"],
            tokens_shown=tuple(tokens_shown(row["token_ids"], row["accepted"], ar_row["token_ids"], token_bytes)),
        )

    return Disagreement(question=question, ar=shown(ar_row, AR.name), other=shown(setting_row, setting))


def tokens_shown(
    tokens: Sequence[int], accepted_lengths: Sequence[int], ar_tokens: Sequence[int], token_bytes: Sequence[bytes]
) -> Iterator[ShownToken]:
    """Yield the tokens with their texts. A character that spans several tokens is shown with the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    forwards = [forward for forward, gain in enumerate(accepted_lengths) for _ in range(gain)]
    for index, (token, forward) in enumerate(zip(tokens, forwards, strict=True)):
        encoded = token_bytes[token] if token < len(token_bytes) else b""
        text = decoder.decode(encoded, final=index + 1 == len(tokens))
        yield ShownToken(text=text, forward=forward, same=index < len(ar_tokens) and ar_tokens[index] == token)
