"""The scores of all questions at all settings, as arrays of numbers in the order of the tasks.

No text and no token is kept, so memory grows by some bytes an answer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mars_ray.evaluation.tasks.registry import Question, Task

KEY_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """The scores of one answer."""

    right: bool
    tokens: int
    forwards: int
    agreed: int
    """Tokens that autoregressive decoding chooses too."""
    key: bytes
    """Hash of its tokens, `KEY_BYTES` long: two answers are the same when these are."""
    accepted_lengths: Sequence[int]
    """Tokens that each forward gave."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SettingScores:
    """The scores of one setting, an entry for each question; 0 where there is no answer."""

    answered: NDArray[np.bool_]
    right: NDArray[np.int8]
    tokens: NDArray[np.int64]
    forwards: NDArray[np.int64]
    agreed: NDArray[np.int64]
    key: NDArray[np.void]


class Scores:
    """The scores of all answers."""

    def __init__(self, tasks: Sequence[Task], settings: Sequence[str], block: int) -> None:
        questions = [question for task in tasks for question in task.questions]
        count = len(questions)
        self.tasks = tuple(task.name for task in tasks)
        self.task = np.array([self.tasks.index(question.task) for question in questions])
        self.seed = np.array([question.seed for question in questions])
        self.settings: Mapping[str, SettingScores] = {
            name: SettingScores(
                answered=np.zeros(count, bool),
                right=np.zeros(count, np.int8),
                tokens=np.zeros(count, np.int64),
                forwards=np.zeros(count, np.int64),
                agreed=np.zeros(count, np.int64),
                key=np.zeros(count, f"V{KEY_BYTES}"),
            )
            for name in settings
        }
        self.stops: Mapping[str, Counter[int]] = {name: Counter() for name in settings}
        self.block = block
        self._place = {question.name: place for place, question in enumerate(questions)}

    def add(self, question: Question, setting: str, answer: ScoredAnswer) -> None:
        """Take an answer into account."""
        column, place = self.settings[setting], self._place[question.name]
        column.answered[place] = True
        column.right[place] = answer.right
        column.tokens[place] = answer.tokens
        column.forwards[place] = answer.forwards
        column.agreed[place] = answer.agreed
        column.key[place] = np.void(answer.key)
        # The last forward was cut where the answer ends, not where confidence did.
        self.stops[setting].update(min(gain, self.block) for gain in answer.accepted_lengths[:-1])
