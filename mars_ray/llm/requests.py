"""Turn what a caller of `LLM` or `AsyncLLM` gives into requests to the engine.

A value out of range is a `RequestError` that names it; nothing is decoded here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from mars_ray.data.chat import ChatEncoder
from mars_ray.data.records import Message
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import RequestError

Prompt = str | Sequence[int]
"""A text, tokenised as the model's tokenizer does it, or token ids."""
Conversation = str | Sequence[Message]
"""Messages as OpenAI's chat API takes them, or what a user says in a single one."""
Schema = str | Mapping[str, Any] | type[BaseModel]
"""A JSON schema as text or as a mapping, or a pydantic model."""

_numbers = count()


def as_prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, where one or several were given."""
    one = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))
    return cast(list[Prompt], [given] if one else list(given))


def as_conversations(given: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return a list of conversations, where one or several were given."""
    one = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], Mapping))
    return cast(list[Conversation], [given] if one else list(given))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Return the token ids of a prompt."""
    return tuple(tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else tuple(prompt)


def encode_conversation(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> tuple[int, ...]:
    """Return the token ids up to where the assistant answers.

    Raises `ModelError` for a model without a chat template and `BadRecordError` for what the template refuses.
    """
    messages = [Message(role="user", content=conversation)] if isinstance(conversation, str) else conversation
    return tuple(ChatEncoder(tokenizer).prompt(messages))


def make_requests(
    prompts: Sequence[tuple[int, ...]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    threshold: float | None,
    mode: Mode | str,
    schema: Schema | None,
    default: SamplingParams,
) -> list[Request]:
    """Return a request for each prompt, sampled by `default` where nothing is given.

    Raises `RequestError` for values out of range.
    """
    if isinstance(sampling_params, Sequence):
        if len(sampling_params) != len(prompts):
            raise RequestError(
                f"there are {len(prompts)} prompts and {len(sampling_params)} sampling parameters; give one for all, "
                "or one for each prompt."
            )
        each = list(sampling_params)
    else:
        each = [sampling_params or default] * len(prompts)
    if schema is not None:
        each = [_with_schema(params, schema) for params in each]
    if mode not in list(Mode):
        raise RequestError(f"mode is {mode!r}; choose one of {', '.join(Mode)}.")
    decode = DecodeParams(mode=Mode(mode), threshold=threshold)
    return [
        Request(id=f"llm-{next(_numbers)}", prompt=prompt, sampling=params, decode=decode)
        for prompt, params in zip(prompts, each, strict=True)
    ]


def _with_schema(params: SamplingParams, schema: Schema) -> SamplingParams:
    if params.grammar is not None:
        raise RequestError("a schema and sampling parameters with a grammar are given; give one of them.")
    if isinstance(schema, str):
        text = schema
    else:
        text = json.dumps(schema if isinstance(schema, Mapping) else schema.model_json_schema())
    return replace(params, grammar=GrammarSpec(kind="json_schema", text=text))
