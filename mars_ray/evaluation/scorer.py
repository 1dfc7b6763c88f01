"""Score the answers of a job, reading them and their traces from the job's parquet shards.

The scores of all questions at all settings are kept in arrays, in the order of the tasks. Texts and tokens are not
kept, so an answer takes less than a hundred bytes. Expensive numbers are cached in a file, so that a resumed run need
not compute them again, and the model is loaded only if the agreement of some answer is not cached.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds

from mars_ray.data.chat import ChatEncoder
from mars_ray.errors import RunError
from mars_ray.evaluation.agreement import Tokens, agreed_in_batches
from mars_ray.evaluation.code_check import passes_tests
from mars_ray.evaluation.task_files import MATCHES
from mars_ray.evaluation.tasks import Question, Task
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.progress import ProgressLine
from mars_ray.storage.location import AnyPath, store_errors
from mars_ray.storage.whole_file import write_file

KEY_BYTES = 16
SCORES = np.dtype(
    [
        ("answered", np.bool_),
        ("right", np.int8),
        ("tokens", np.int64),
        ("forwards", np.int64),
        ("agreed", np.int64),
        ("key", f"V{KEY_BYTES}"),
    ]
)
SettingScores = np.recarray[Any, Any]
"""Scores of one setting: one record of `SCORES` per question, which is 0 for an unanswered question."""
BATCH_ROWS = 1024
KEEP_EVERY = 32
"""Number of answers whose agreement is counted between two writes of the cache. A large model takes seconds for each
answer, and in an object store each write rewrites all."""
COLUMNS = ["id", "text", "tokens", "forwards", "token_ids", "accepted"]
Row = dict[str, Any]


def cache_key(*parts: object) -> str:
    """Return a hash of the parts, which must be JSON values."""
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def is_right(question: Question, text: str) -> bool:
    """Return whether `text` answers the question; for code, its tests run in the sandbox."""
    if question.match == "code":
        return passes_tests(question.reference, text)
    return MATCHES[question.match](question.reference, text)


class NumberCache:
    """Numbers, each with a key, in one file. In an object store, each call of `add` rewrites the whole object."""

    def __init__(self, path: AnyPath) -> None:
        self._path = path
        self._numbers: dict[str, int] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                with suppress(ValueError):
                    key, number = json.loads(line)
                    self._numbers[key] = number

    def __contains__(self, key: str) -> bool:
        return key in self._numbers

    def __getitem__(self, key: str) -> int:
        return self._numbers[key]

    def add(self, numbers: Iterable[tuple[str, int]]) -> None:
        """Add numbers and write them to the file. Raises `RunError` if this fails."""
        lines = []
        for key, number in numbers:
            self._numbers[key] = number
            lines.append(json.dumps([key, number]))
        if not lines:
            return
        if not isinstance(self._path, Path):
            all_lines = (json.dumps([key, number]).encode() + b"\n" for key, number in self._numbers.items())
            write_file(self._path, all_lines)
            return
        writing = store_errors(self._path, RunError, "Cannot write", "Free some space; the same command resumes.")
        with writing, self._path.open("a", encoding="utf-8") as file:
            # The leading newline ends a line that an earlier run may have left half-written.
            file.write("\n" + "\n".join(lines) + "\n")


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


class Scores:
    """The scores of all answers."""

    def __init__(self, tasks: Sequence[Task], settings: Sequence[str], block: int) -> None:
        questions = [question for task in tasks for question in task.questions]
        count = len(questions)
        self.tasks = tuple(task.name for task in tasks)
        self.task = np.array([self.tasks.index(question.task) for question in questions])
        self.seed = np.array([question.seed for question in questions])
        self.settings: Mapping[str, SettingScores] = {
            name: np.zeros(count, SCORES).view(np.recarray) for name in settings
        }
        self.stops: Mapping[str, Counter[int]] = {name: Counter() for name in settings}
        self.block = block
        self._index = {question.name: index for index, question in enumerate(questions)}

    def add(self, question: Question, setting: str, answer: ScoredAnswer) -> None:
        """Store the scores of an answer."""
        scores = (True, answer.right, answer.tokens, answer.forwards, answer.agreed, np.void(answer.key))
        self.settings[setting][self._index[question.name]] = scores
        # Leave out the last forward, because the end of the answer cuts it short.
        self.stops[setting].update(min(gain, self.block) for gain in answer.accepted_lengths[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """Scorer of the answers of a job."""

    checkpoint: Callable[[], Checkpoint]
    """Return the model. It is called only if the agreement of some answer is not cached."""
    encoder: ChatEncoder
    cache: NumberCache
    """Cached counts of agreeing tokens, and cached verdicts on code."""
    agreement: bool
    """True to compare every token with the choice of autoregressive decoding."""

    def score(self, folder: Path, tasks: Sequence[Task], settings: Sequence[str], block: int) -> Scores:
        """Return the scores of the answers in `folder`, which holds the job's rows."""
        scores = Scores(tasks, settings, block)
        questions = {question.name: question for task in tasks for question in task.questions}
        total = ds.dataset(folder).count_rows()
        done = 0
        with ProgressLine("score the answers", total=total) as progress:
            for rows in read_answers(folder):
                answers = [(questions[name], setting, row) for row in rows for name, setting in [parts_of(row["id"])]]
                agreed = self._agreed([(question, row) for question, _, row in answers])
                for (question, setting, row), count in zip(answers, agreed, strict=True):
                    scores.add(question, setting, self._scored(question, row, count))
                    done += 1
                    progress.update(done, {})
        return scores

    def _scored(self, question: Question, row: Row, agreed: int) -> ScoredAnswer:
        return ScoredAnswer(
            right=self._right(question, row["text"]),
            tokens=row["tokens"],
            forwards=row["forwards"],
            agreed=agreed,
            key=bytes.fromhex(cache_key(row["token_ids"]))[:KEY_BYTES],
            accepted_lengths=row["accepted"],
        )

    def _right(self, question: Question, text: str) -> bool:
        if question.match != "code":
            return is_right(question, text)
        key = cache_key("code", question.reference, text)
        if key not in self.cache:
            self.cache.add([(key, int(is_right(question, text)))])
        return bool(self.cache[key])

    def _agreed(self, answers: Sequence[tuple[Question, Row]]) -> list[int]:
        if not self.agreement:
            return [0] * len(answers)
        prompts = {question.name: tuple(self.encoder.prompt(question.messages)) for question, _ in answers}
        pairs = [(prompts[question.name], tuple(row["token_ids"])) for question, row in answers]
        keys = [cache_key("agreed", *pair) for pair in pairs]
        # Compare each distinct answer only once, because most settings give the same answer.
        uncached: dict[str, tuple[Tokens, Tokens]] = {
            key: pair for key, pair in zip(keys, pairs, strict=True) if key not in self.cache
        }
        if uncached:
            model, new_keys = self.checkpoint(), list(uncached)
            kept: dict[str, int] = {}
            for counts in agreed_in_batches(model.network, list(uncached.values()), model.mask_id):
                kept |= {new_keys[number]: count for number, count in counts.items()}
                if len(kept) >= KEEP_EVERY:
                    self.cache.add(kept.items())
                    kept = {}
            self.cache.add(kept.items())
        return [self.cache[key] for key in keys]


def read_answers(folder: Path, ids: Collection[str] | None = None) -> Iterator[list[Row]]:
    """Yield the rows of the shards in batches; if `ids` is given, only the rows with these ids."""
    id_filter = None if ids is None else ds.field("id").isin(list(ids))
    shards = ds.dataset(folder)
    if not shards.files:  # nothing was answered, so the columns are unknown
        return
    for batch in shards.to_batches(columns=COLUMNS, filter=id_filter, batch_size=BATCH_ROWS):
        if batch.num_rows:
            yield batch.to_pylist()


def row_id(question: Question, setting: str) -> str:
    """Return the id of the job's row that answers a question with a setting."""
    return f"{question.name}/{setting}"


def parts_of(id: str) -> tuple[str, str]:
    """Return the name of the question and the name of the setting in a row id."""
    name, _, setting = id.rpartition("/")
    return name, setting
