"""Messages -> token ids, with the tokens of every assistant turn marked.

In:    conversations, and a tokenizer with a chat template.
Out:   ids and, for training, which of them the model itself must produce.
Never: truncates, packs, or guesses a template.

The turns are found in the rendered text: what the template adds for an assistant turn, up to and including the
first end-of-sequence token, is the response. The whole conversation is tokenised once, so that the ids are those a
model sees, whatever merges across a boundary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mars_ray.data.records import Message, Record
from mars_ray.errors import BadRecordError, ModelError


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tokenised conversation; both lists have one entry per token."""

    tokens: list[int]
    response: list[bool]


class ChatEncoder:
    """Renders conversations with the chat template of a tokenizer. Raises `ModelError` when it has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ModelError("The tokenizer has no chat template; add chat_template.jinja to the model folder.")
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids up to where the assistant answers the last message."""
        ids: list[int] = self._tokenizer(self._render(messages, answering=True), add_special_tokens=False)["input_ids"]
        return ids

    def encode(self, records: Sequence[Record]) -> list[Encoded | BadRecordError]:
        """Encode each record; one that the template cannot render comes back as the error instead."""
        spans: list[list[tuple[int, int]] | BadRecordError] = []
        texts: list[str] = []
        for record in records:
            try:
                spans.append(self._response_spans(record.messages))
                texts.append(self._render(record.messages))
            except BadRecordError as error:
                spans.append(error)
                texts.append("")
        batch = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        return [
            span if isinstance(span, BadRecordError) else self._mark(ids, offsets, span)
            for span, ids, offsets in zip(spans, batch["input_ids"], batch["offset_mapping"], strict=True)
        ]

    def _render(self, messages: Sequence[Message], answering: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=answering
            )
        except Exception as error:  # a template is a program of the model's author: anything may come out of it
            raise BadRecordError(f"the chat template refuses it: {error}") from error
        return text

    def _response_spans(self, messages: Sequence[Message]) -> list[tuple[int, int]]:
        """Return start and end character of each assistant turn in the rendered text."""
        whole = self._render(messages)
        spans = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:turn], answering=True)
            after = self._render(messages[: turn + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise BadRecordError(f"the chat template rewrites earlier turns, so turn {turn} cannot be located")
            spans.append((len(before), len(after)))
        return spans

    def _mark(self, ids: list[int], offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> Encoded:
        response = [False] * len(ids)
        token = 0
        for start, end in spans:
            while token < len(ids) and offsets[token][0] < start:
                token += 1
            while token < len(ids) and offsets[token][0] < end:
                response[token] = True
                token += 1
                if ids[token - 1] == self._tokenizer.eos_token_id:
                    break
        return Encoded(ids, response)
