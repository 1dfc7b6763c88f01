"""Turn messages into token ids, and mark the tokens of every assistant turn.

A response is the text that the template adds for an assistant turn, up to and including the first end-of-sequence
token. The whole conversation is tokenised once, so the ids are those that a model sees, even where tokens merge across
a boundary. A token that begins before the turn does not belong to the response.

Text in a message that spells a special token becomes that token, as elsewhere in transformers. It cannot move a mark,
because marks are positions in the text; but a response that spells the end-of-sequence token ends there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import BatchEncoding, PreTrainedTokenizerBase

from mars_ray.chat.call_format import answer_format, markers_of
from mars_ray.chat.conversation import Conversation, PlainMessage, template_conversation
from mars_ray.data.records import Record
from mars_ray.errors import BadRecordError, ModelError, RequestError


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One tokenised conversation; both arrays have one entry per token."""

    tokens: NDArray[np.int32]
    response: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Rendered:
    text: str
    turns: list[tuple[int, int]]
    """Start and end character of each assistant turn."""


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template, or all of them if the tokenizer has several, of which one is for tools."""
    template: str | dict[str, str] = tokenizer.chat_template or ""
    return template if isinstance(template, str) else "\n".join(template.values())


class ChatEncoder:
    """Renders conversations with the chat template of a tokenizer. Raises `ModelError` if there is no template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ModelError("The tokenizer has no chat template; add chat_template.jinja to the model folder.")
        self._tokenizer = tokenizer
        self.format = answer_format(template_of(tokenizer), markers_of(tokenizer))
        """Notation of tool calls and reasoning in the model's template and vocabulary."""

    def prompt(self, messages: Sequence[PlainMessage]) -> list[int]:
        """Return the ids of a conversation up to the start of the assistant's answer.

        Raises `RequestError` for tool calls that the model cannot be given.
        """
        return self.ids(self.prompt_text(template_conversation(messages, (), self.format).messages))

    def prompt_text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text of a conversation up to the start of the assistant's answer."""
        return self._render(messages, answering=True, tools=tools)

    def whole_text(self, messages: Sequence[PlainMessage]) -> str:
        """Return the text of a conversation that ends with the assistant's answer. Raises as `prompt` does."""
        return self._render(template_conversation(messages, (), self.format, answered=False).messages)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text that the template has rendered."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def encode(self, records: Sequence[Record]) -> list[Encoded | BadRecordError]:
        """Return the encoding of each record, or the error if the template cannot render the record.

        Raises `ModelError` for a tokenizer that does not report the positions of tokens in the text.
        """
        if not self._tokenizer.is_fast:
            raise ModelError("The tokenizer has no tokenizer.json, which is needed to mark the responses.")
        rendered = [self._rendered(record) for record in records]
        encoded = iter(self._tokenised([outcome for outcome in rendered if isinstance(outcome, _Rendered)]))
        return [outcome if isinstance(outcome, BadRecordError) else next(encoded) for outcome in rendered]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        answering: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=answering
            )
        except Exception as error:  # a template is a program and may raise any error
            raise BadRecordError(f"the chat template refuses it: {error}") from error
        return text

    def _rendered(self, record: Record) -> _Rendered | BadRecordError:
        try:
            talk = template_conversation(record.messages, record.tools, self.format, answered=False)
            whole = self._render(talk.messages, tools=talk.tools)
            turns = [n for n, message in enumerate(talk.messages) if message["role"] == "assistant"]
            return _Rendered(whole, [self._turn(talk, turn, whole) for turn in turns])
        except RequestError as error:
            return BadRecordError(str(error).removesuffix("."))
        except BadRecordError as error:
            return error

    def _turn(self, talk: Conversation, turn: int, whole: str) -> tuple[int, int]:
        if turn == 0:
            raise BadRecordError("its first message is the assistant's, which answers nothing")
        before = self._render(talk.messages[:turn], answering=True, tools=talk.tools)
        is_last = turn + 1 == len(talk.messages)
        after = whole if is_last else self._render(talk.messages[: turn + 1], tools=talk.tools)
        if not (whole.startswith(after) and after.startswith(before)):
            raise BadRecordError(f"the chat template rewrites earlier turns, so message {turn} cannot be located")
        for call in talk.messages[turn].get("tool_calls", ()):
            if call["function"]["name"] not in after[len(before) :]:
                raise BadRecordError(f"the chat template leaves out the calls of message {turn}")
        return len(before), len(after)

    def _tokenised(self, rendered: list[_Rendered]) -> list[Encoded | BadRecordError]:
        if not rendered:
            return []
        batch = self._tokenizer(
            [conversation.text for conversation in rendered], add_special_tokens=False, return_attention_mask=False
        )
        return [self._encoded(batch, row, conversation.turns) for row, conversation in enumerate(rendered)]

    def _encoded(self, batch: BatchEncoding, row: int, turns: list[tuple[int, int]]) -> Encoded | BadRecordError:
        ids = batch["input_ids"][row]
        eos = self._tokenizer.eos_token_id
        response = np.zeros(len(ids), dtype=np.bool_)
        for start, end in turns:
            first = _first_token(batch, row, start, end)
            stop = ids.index(eos, first) if eos in ids[first:] else len(ids)
            if stop == len(ids) or batch.token_to_chars(row, stop).start >= end:
                return BadRecordError(
                    f"the chat template ends a turn without the end-of-sequence token {self._tokenizer.eos_token!r}: "
                    "the model would not learn to stop, so correct eos_token in its tokenizer_config.json"
                )
            response[first : stop + 1] = True
        return Encoded(np.array(ids, dtype=np.int32), response)


def _first_token(batch: BatchEncoding, row: int, start: int, end: int) -> int:
    """Return the first token that begins at or after the character `start`."""
    # Some tokenizers exclude spaces from the span of a token, so a space may belong to no token.
    tokens = (batch.char_to_token(row, char) for char in range(start, end))
    token: int | None = next((candidate for candidate in tokens if candidate is not None), None)
    if token is None:
        return len(batch["input_ids"][row])
    if batch.token_to_chars(row, token).start < start:
        return token + 1
    while token and batch.token_to_chars(row, token - 1).start > start:
        token -= 1
    return token
