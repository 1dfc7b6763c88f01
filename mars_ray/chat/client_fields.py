"""Fields that clients and data sets are known to have in conversations and that change no prompt, with their sources.

Clients send earlier answers back with extra fields: parsed objects, fields of other providers, and their own notes.
Data sets have notes on their turns. Any other field that a message does not have is refused, so that misspelt ones are
noticed. The platform has the fields of its own APIs.
"""

from collections.abc import Sequence, Set
from typing import Any, ClassVar

from pydantic import model_validator

from mars_ray.chat.request_body import PARTS_MAX, RequestBody
from mars_ray.errors import RequestError

EVERYWHERE = {
    "cache_control": "Anthropic's prompt caching; LiteLLM and agents set it on messages, parts, calls and tools",
    "provider_specific_fields": "LiteLLM's Message, its calls and functions: fields of the answer's provider",
    "extra_content": "Google's OpenAI-compatible API: signatures of thoughts, on messages and calls",
}
"""Fields of messages, parts and calls of any API."""
_MESSAGE = EVERYWHERE | {
    "created_at": "agents that note the time of a turn",
    "id": "the Responses API, LangChain and AG-UI: id of the message",
    "index": "openai's stream(...).get_final_completion() and clients that merge a choice into its message",
    "metadata": "LangGraph and agents: notes of the application",
    "model": "clients that note which model answered",
    "status": "the Responses API and agents: completed, incomplete",
    "timestamp": "agents that note the time of a turn, such as nanobot",
    "usage": "clients that note the price of an answer",
    "weight": "OpenAI's fine-tuning files and OpenHermes: whether a turn is learnt; `data/records` refuses 0",
    **dict.fromkeys(
        ("country", "hashed_ip", "header", "language", "openai_id", "redacted", "state", "toxic", "turn_identifier"),
        "WildChat's conversations: notes on a turn",
    ),
}
_ASSISTANT = {
    "annotations": "openai.types.chat.ChatCompletionMessage: places in the text that cite a source",
    "citations": "LiteLLM and Perplexity: sources of the answer",
    "content_filter_results": "Azure OpenAI",
    "finish_reason": "agents that merge a choice into its message, such as hermes-agent",
    "images": "LiteLLM's Message and OpenRouter: pictures that the answer held, next to its text",
    "logprobs": "clients that merge a choice into its message",
    "parsed": "openai's chat.completions.parse(): the content as an object",
    "phase": "the Responses API: whether a message is commentary or the final answer",
    "reasoning_details": "OpenRouter: reasoning in parts, also encrypted",
    "reasoning_items": "LiteLLM's Message: items of the Responses API",
    "reasoning_signature": "gateways to Anthropic: signature of the reasoning",
    "stop_reason": "vLLM's choices and Anthropic's messages",
    "thinking_blocks": "LiteLLM's Message and openai-agents: Anthropic's reasoning with signatures",
    "token_ids": "vLLM's choices",
}
_PART = EVERYWHERE | {
    "annotations": "LangChain's text blocks and the Responses API",
    "citations": "Anthropic's text blocks, by way of LiteLLM",
    "extras": "LangChain's content blocks: fields of the answer's provider",
    "id": "LangChain's content blocks",
    "index": "LangChain's content blocks of a stream",
    "logprobs": "the Responses API",
    "prompt_cache_breakpoint": "openai.types.chat.ChatCompletionContentPartTextParam",
}
_CALL = EVERYWHERE | {
    "index": "openai's stream(...).get_final_completion() and LiteLLM: place of the call in the stream",
    "status": "agents: completed, incomplete",
    "thought_signature": "Google's models behind gateways",
}
_FUNCTION = {
    "parsed_arguments": "openai's chat.completions.parse() with pydantic_function_tool",
    "provider_specific_fields": "LiteLLM's calls",
    "thought_signature": "Google's models behind gateways",
}
_DEFINITION = {
    "allowed_callers": "Anthropic's tools: the model or its code may call them",
    "cache_control": "Anthropic's prompt caching; LiteLLM and agents set it on tools",
    "defer_loading": "Anthropic's and OpenAI's search of tools",
    "eager_input_streaming": "Claude Code: how Anthropic's servers cut the arguments of a stream",
    "input_examples": "Anthropic's tools: arguments that show how a tool is used",
    "output_schema": "openai.types.responses.FunctionTool: schema of the result",
    "return": "transformers.utils.get_json_schema: schema of the result",
}
MESSAGE_FIELDS = frozenset(_MESSAGE)
"""Fields of a message that have no effect."""
ASSISTANT_FIELDS = MESSAGE_FIELDS | _ASSISTANT.keys()
"""Fields of an assistant's message that have no effect."""
PART_FIELDS = frozenset(_PART)
"""Fields of a content part that have no effect."""
CALL_FIELDS = frozenset(_CALL)
"""Fields of a tool call that have no effect."""
FUNCTION_FIELDS = frozenset(_FUNCTION)
"""Fields of a function in a tool call that have no effect."""
DEFINITION_FIELDS = frozenset(_DEFINITION)
"""Fields of a tool, and of the definition of its function, without effect."""


def kept_fields(value: dict[str, Any], unused: Set[str]) -> dict[str, Any]:
    """Return the fields of an object that take effect: those that are neither null nor unused."""
    return {name: item for name, item in value.items() if item is not None and name not in unused}


def joined_texts(content: Any, unused: Set[str], kinds: Sequence[str] = ("text",), param: str | None = None) -> Any:
    """Return a list of text parts as one text, and any other content as it is, so that pydantic checks it.

    Joining avoids a pydantic model per part: a body has room for 40,000 parts, and that many models would delay all
    other callers. Raises `RequestError` for a part of another kind, if `param` names the field of the content.
    """
    if not isinstance(content, list) or not 1 <= len(content) <= PARTS_MAX:
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if param is not None and isinstance(kind, str) and kind not in kinds:
            raise RequestError(f"content of type {kind[:40]!r} is not supported; only text is.", param=param)
        if kind not in kinds or not isinstance(part.get("text"), str):
            return content
        if len(part) > 2 and kept_fields(part, unused).keys() != {"type", "text"}:
            return content
    return "".join(part["text"] for part in content)


class SentBack(RequestBody):
    """An object of a conversation. Null and fields that clients send back mean the same as leaving the field out."""

    unused: ClassVar[frozenset[str]]

    @model_validator(mode="before")
    @classmethod
    def _drop_unused_fields(cls, value: Any) -> Any:
        return kept_fields(value, cls.unused) if isinstance(value, dict) else value
