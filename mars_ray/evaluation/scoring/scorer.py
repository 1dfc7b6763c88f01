"""Score the answers of a job, reading them and their traces from the job's parquet shards.

The model is loaded only if the agreement of some answer is not cached.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import torch

from mars_ray.data.chat import ChatEncoder
from mars_ray.evaluation.number_cache import NumberCache, cache_key
from mars_ray.evaluation.scoring.agreement import Tokens, agreed_tokens
from mars_ray.evaluation.scoring.code_check import passes_tests
from mars_ray.evaluation.scoring.scores import KEY_BYTES, ScoredAnswer, Scores
from mars_ray.evaluation.tasks.registry import Question, Task
from mars_ray.evaluation.tasks.verify import MATCHES
from mars_ray.model.checkpoint import Checkpoint, load_model
from mars_ray.model.folder import ResolvedModel
from mars_ray.progress import ProgressLine

BATCH_ROWS = 1024
COLUMNS = ["id", "text", "tokens", "forwards", "token_ids", "accepted"]

Row = dict[str, Any]


class LazyCheckpoint:
    """A model that is loaded when it is first used."""

    def __init__(self, model: ResolvedModel) -> None:
        self._model = model

    @cached_property
    def loaded(self) -> Checkpoint:
        """The loaded model, on the GPU if there is one."""
        return load_model(self._model, device="cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """Scorer of the answers of a job."""

    checkpoint: LazyCheckpoint
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
                agreed = self._agreed([(question, row) for question, _, row in answers], progress, done)
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
            return MATCHES[question.match](question.reference, text)
        key = cache_key("code", question.reference, text)
        if key not in self.cache:
            self.cache.add([(key, int(passes_tests(question.reference, text)))])
        return bool(self.cache[key])

    def _agreed(self, answers: Sequence[tuple[Question, Row]], progress: ProgressLine, done: int) -> list[int]:
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
            model = self.checkpoint.loaded
            counts = agreed_tokens(model.network, list(uncached.values()), model.mask_id, progress, done)
            self.cache.add(zip(uncached, counts, strict=True))
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
