"""Rows -> answers, decoded together.

In:    JSON texts of rows.
Out:   for each, in order, a `Generated`, or a `Rejected` with the reason.
Never: fails as a whole because of one row, truncates a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from mars_ray.batch.outcomes import Generated, Rejected
from mars_ray.batch.rows import Row, given_id, parse_row
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.engine import Engine
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import BadRecordError, RequestError
from mars_ray.model.checkpoint import Checkpoint


@dataclass(slots=True)
class _Answer:
    """A row that is being decoded, its place among all, and what it says so far."""

    place: int
    row: Row
    text: list[str] = field(default_factory=list)


class Generator:
    """Answers rows with one model, whose attention it replaces. Raises `ModelError` without chat template.

    Every row is sampled and decoded alike; an answer ends where the context of the model does, at the latest.
    """

    def __init__(
        self, checkpoint: Checkpoint, sampling: SamplingParams, decode: DecodeParams, options: EngineOptions
    ) -> None:
        self._encoder = ChatEncoder(checkpoint.tokenizer)
        self._engine = Engine(checkpoint, options)
        self._sampling, self._decode = sampling, decode
        self._numbers = count()

    def run(self, raws: Sequence[bytes]) -> list[Generated | Rejected]:
        """Answer every row."""
        outcomes: dict[int, Generated | Rejected] = {}
        answers: dict[str, _Answer] = {}
        left = enumerate(raws)
        while len(outcomes) < len(raws):
            while self._engine.waiting < self._engine.limits.rows and (coming := next(left, None)):
                place, raw = coming
                try:
                    request, row = self._request(raw)
                    self._engine.add(request)
                    answers[request.id] = _Answer(place, row)
                except (BadRecordError, RequestError) as error:
                    outcomes[place] = _rejected(raw, str(error))
            for chunk in self._engine.step():
                answer = answers[chunk.request_id]
                answer.text.append(chunk.text)
                if chunk.finished:
                    outcomes[answer.place] = _outcome(answers.pop(chunk.request_id), raws[answer.place], chunk)
        return [outcomes[place] for place in range(len(raws))]

    def _request(self, raw: bytes) -> tuple[Request, Row]:
        row = parse_row(raw)
        tokens = tuple(self._encoder.prompt(row.messages))
        if not tokens:
            raise BadRecordError("the chat template renders it to nothing")
        # Ids of rows need not differ; those of requests must.
        return Request(id=str(next(self._numbers)), prompt=tokens, sampling=self._sampling, decode=self._decode), row


def _outcome(answer: _Answer, raw: bytes, last: Chunk) -> Generated | Rejected:
    finished = last.finished
    assert finished is not None
    if finished.reason not in ("stop", "length"):
        return _rejected(raw, str(finished.error))
    return Generated(
        id=answer.row.id,
        prompt=answer.row.prompt,
        text="".join(answer.text),
        tokens=finished.tokens,
        forwards=finished.forwards,
        finish_reason=finished.reason,
    )


def _rejected(raw: bytes, reason: str) -> Rejected:
    return Rejected(id=given_id(raw), reason=reason, row=raw.decode(errors="replace"))
