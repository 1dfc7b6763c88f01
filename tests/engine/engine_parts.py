"""Small real parts the tests of the engine's parts share."""

from collections.abc import Iterable
from functools import cache

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mars_ray.engine.kv.slots import CacheOp, Copy, Resize, Swap
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.engine.scheduling.detokenizer import TextStream
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.service_class import STANDARD
from mars_ray.model.resolve import resolve_model


@cache
def bundled_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(resolve_model("bundled"))


def sequence_of(
    prompt: Iterable[int],
    output: Iterable[int] = (),
    *,
    decode: DecodeParams | None = None,
    stop_ids: Iterable[int] = (),
    seed: int = 0,
    cached: int = 0,
    row: int | None = None,
    drafts: Iterable[int] = (),
    limit: int | None = None,
    service_class: str = STANDARD,
    **sampling: object,
) -> Sequence:
    """A sequence that has read `prompt` and said `output`."""
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    request = Request(
        id="a",
        prompt=tuple(prompt),
        service_class=service_class,
        sampling=params,
        decode=decode or DecodeParams(),
    )
    return Sequence(
        request=request,
        index=0,
        seed=seed if params.seed is None else params.seed,
        limit=limit or params.max_tokens,
        stop_ids=frozenset(stop_ids) | params.stop_ids,
        text=TextStream(bundled_tokenizer(), params.stop),
        tokens=[*request.prompt, *output],
        cached=cached,
        row=row,
        drafts=list(drafts),
    )


class ShadowCache:
    """What the tensors of the cache would hold: a token for each position of each row, None where nothing is."""

    def __init__(self) -> None:
        self.rows: list[list[int | None]] = []
        self.width = 0

    def apply(self, operations: list[CacheOp]) -> None:
        for operation in operations:
            match operation:
                case Copy(source, target, length):
                    self.rows[target][:length] = self.rows[source][:length]
                case Swap(one, other, length):
                    a, b = self.rows[one], self.rows[other]
                    a[:length], b[:length] = b[:length], a[:length]
                case Resize(rows, width):
                    kept = [row[:width] for row in self.rows[:rows]]
                    self.rows = [row + [None] * (width - len(row)) for row in kept]
                    self.rows += [[None] * width for _ in range(rows - len(kept))]
                    self.width = width
        assert all(len(row) == self.width for row in self.rows), "an operation reaches past the end of a row"

    def write(self, row: int, start: int, tokens: Iterable[int]) -> None:
        for position, token in enumerate(tokens, start=start):
            self.rows[row][position] = token
