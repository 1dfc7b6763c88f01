"""Rows -> answers, in batches of prompts of like length.

In:    JSON texts of rows.
Out:   for each, in order, a `Generated`, or a `Rejected` with the reason.
Never: fails as a whole because of one row, truncates a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mars_ray.batch.outcomes import Generated, Rejected
from mars_ray.batch.rows import Row, given_id, parse_row
from mars_ray.data.chat import ChatEncoder
from mars_ray.errors import BadRecordError
from mars_ray.method.reference import Decoded, DecodeOptions, decode
from mars_ray.model.checkpoint import Checkpoint

BATCH_ROWS = 32
"""Rows decoded together."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A row ready to be decoded, and its place among all."""

    place: int
    row: Row
    tokens: list[int]


class Generator:
    """Answers rows with one model. The stop tokens are the model's own. Raises `ModelError` without chat template."""

    def __init__(self, checkpoint: Checkpoint, options: DecodeOptions) -> None:
        self._checkpoint = checkpoint
        self._encoder = ChatEncoder(checkpoint.tokenizer)
        self._options = replace(options, stop_ids=checkpoint.stop_ids)
        self._positions: int = checkpoint.network.config.max_position_embeddings

    def run(self, raws: Sequence[bytes]) -> list[Generated | Rejected]:
        """Answer every row."""
        outcomes: dict[int, Generated | Rejected] = {}
        prompts: list[_Prompt] = []
        for place, raw in enumerate(raws):
            try:
                prompts.append(self._prompt(place, raw))
            except BadRecordError as error:
                outcomes[place] = _rejected(raw, str(error))
        # The decoder fills every prompt up to the longest of its batch: like lengths together waste the least.
        prompts.sort(key=lambda prompt: len(prompt.tokens))
        for start in range(0, len(prompts), BATCH_ROWS):
            for prompt, result in self._decode(prompts[start : start + BATCH_ROWS]):
                place = prompt.place
                outcomes[place] = (
                    _rejected(raws[place], result) if isinstance(result, str) else self._generated(prompt.row, result)
                )
        return [outcomes[place] for place in range(len(raws))]

    def _prompt(self, place: int, raw: bytes) -> _Prompt:
        row = parse_row(raw)
        tokens = self._encoder.prompt(row.messages)
        if not tokens:
            raise BadRecordError("the chat template renders it to nothing")
        needed = len(tokens) + self._options.max_tokens
        if needed > self._positions:
            raise BadRecordError(
                f"it is too long: {len(tokens)} prompt tokens and up to {self._options.max_tokens} new ones "
                f"are {needed}, the model has {self._positions} positions; shorten the prompt or lower max-tokens"
            )
        return _Prompt(place, row, tokens)

    def _decode(self, prompts: list[_Prompt]) -> list[tuple[_Prompt, Decoded | str]]:
        """Decode one batch; a row that cannot be decoded comes with the reason instead."""
        network, mask_id = self._checkpoint.network, self._checkpoint.mask_id
        try:
            decoded = decode(network, [prompt.tokens for prompt in prompts], self._options, mask_id=mask_id)
        except Exception as error:  # memory, or a model's own code: the other rows must go on
            if len(prompts) > 1:
                return [outcome for prompt in prompts for outcome in self._decode([prompt])]
            return [(prompts[0], f"decoding it failed: {type(error).__name__}: {error}")]
        return list(zip(prompts, decoded, strict=True))

    def _generated(self, row: Row, decoded: Decoded) -> Generated:
        said = decoded.tokens[:-1] if decoded.finish_reason == "stop" else decoded.tokens
        return Generated(
            id=row.id,
            prompt=row.prompt,
            text=self._checkpoint.tokenizer.decode(said, skip_special_tokens=True),
            tokens=len(decoded.tokens),
            forwards=decoded.forwards,
            finish_reason=decoded.finish_reason,
        )


def _rejected(raw: bytes, reason: str) -> Rejected:
    return Rejected(id=given_id(raw), reason=reason, row=raw.decode(errors="replace"))
