"""Answers that differ from those of autoregressive decoding, ready to be shown token by token.

Those that cost a right answer are shown first, from as many tasks as there are.
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
"""Examples of each setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """One token as it is shown."""

    text: str
    forward: int
    """Number of the answer's forward that gave it, from 0."""
    same: bool
    """Autoregressive decoding has the same token at this place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAnswer:
    """One answer as it is shown."""

    right: bool
    tokens: int
    forwards: int
    tokens_shown: tuple[ShownToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """One question, answered in two ways."""

    question: Question
    ar: ShownAnswer
    other: ShownAnswer


def disagreements(
    scores: Scores, tasks: Sequence[Task], settings: Sequence[str], folder: Path, token_bytes: Sequence[bytes]
) -> dict[str, list[Disagreement]]:
    """Return examples by setting; settings without any are left out."""
    questions = [question for task in tasks for question in task.questions]
    places = {setting: _places(scores, setting) for setting in settings if setting != AR.name}
    ids = {
        row_id(questions[place], name)
        for setting, chosen in places.items()
        for place in chosen
        for name in (setting, AR.name)
    }
    rows = {row["id"]: row for batch in read_answers(folder, ids) for row in batch} if ids else {}
    return {
        setting: [_shown(scores, questions[place], place, setting, rows, token_bytes) for place in chosen]
        for setting, chosen in places.items()
        if chosen
    }


def _places(scores: Scores, setting: str) -> list[int]:
    column, ar = scores.settings[setting], scores.settings[AR.name]
    differs = column.answered & ar.answered & (column.key != ar.key)
    change = column.right - ar.right
    chosen: list[int] = []
    for verdict in (change < 0, change > 0, change == 0):
        by_task = [np.flatnonzero(differs & verdict & (scores.task == task)) for task in range(len(scores.tasks))]
        in_turns = chain.from_iterable(zip_longest(*(places[:EXAMPLES] for places in by_task)))
        chosen += [int(place) for place in in_turns if place is not None]
    return chosen[:EXAMPLES]


def _shown(
    scores: Scores,
    question: Question,
    place: int,
    setting: str,
    rows: Mapping[str, Row],
    token_bytes: Sequence[bytes],
) -> Disagreement:
    ar, other = (rows[row_id(question, name)] for name in (AR.name, setting))

    def shown(row: Row, name: str) -> ShownAnswer:
        return ShownAnswer(
            right=bool(scores.settings[name].right[place]),
            tokens=row["tokens"],
            forwards=row["forwards"],
            tokens_shown=tuple(tokens_shown(row["token_ids"], row["accepted"], ar["token_ids"], token_bytes)),
        )

    return Disagreement(question=question, ar=shown(ar, AR.name), other=shown(other, setting))


def tokens_shown(
    tokens: Sequence[int], accepted_lengths: Sequence[int], ar_tokens: Sequence[int], token_bytes: Sequence[bytes]
) -> Iterator[ShownToken]:
    """Yield the tokens as text; a character that several share stands where the last of them does."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    forwards = [forward for forward, gain in enumerate(accepted_lengths) for _ in range(gain)]
    for place, (token, forward) in enumerate(zip(tokens, forwards, strict=True)):
        spelled = token_bytes[token] if token < len(token_bytes) else b""
        text = decoder.decode(spelled, final=place + 1 == len(tokens))
        yield ShownToken(text=text, forward=forward, same=place < len(ar_tokens) and ar_tokens[place] == token)
