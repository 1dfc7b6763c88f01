"""Keep the scores of all questions at all settings in arrays, in the order of the tasks.

Texts and tokens are not kept, so an answer takes less than a hundred bytes.
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
    """Number of tokens that autoregressive decoding would also choose."""
    key: bytes
    """Hash of the tokens, `KEY_BYTES` bytes long."""
    accepted_lengths: Sequence[int]
    """Number of tokens that each forward gave."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SettingScores:
    """Scores of one setting, as arrays with one entry per question. Entries of unanswered questions are 0."""

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
        self._index = {question.name: index for index, question in enumerate(questions)}

    def add(self, question: Question, setting: str, answer: ScoredAnswer) -> None:
        """Store the scores of an answer."""
        column = self.settings[setting]
        index = self._index[question.name]
        column.answered[index] = True
        column.right[index] = answer.right
        column.tokens[index] = answer.tokens
        column.forwards[index] = answer.forwards
        column.agreed[index] = answer.agreed
        column.key[index] = np.void(answer.key)
        # Leave out the last forward, because the end of the answer cuts it short.
        self.stops[setting].update(min(gain, self.block) for gain in answer.accepted_lengths[:-1])
