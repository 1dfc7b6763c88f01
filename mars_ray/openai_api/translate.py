"""Translate a checked body into requests to the engine.

In:    a checked request of the API, its prompts as token ids, the limits, and the operator's defaults.
Out:   one engine request per prompt.
Never: shortens a prompt, or gives the caller less than the request asks for without saying so.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from mars_ray.chat.request_body import MESSAGES_MAX
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import NUMBERS, DecodeParams, Request, SamplingParams
from mars_ray.errors import PromptTooLongError, RequestError
from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.openai_api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from mars_ray.openai_api.request_limits import RequestLimits

COMPLETION_TOKENS = 16
"""Default `max_tokens` of a completion, as in OpenAI's API reference. Chat answers have a higher default, which is
`RequestLimits.default_output_tokens`."""

BEGINNING_TOKENS = 64
"""Number of leading tokens that form the key of prompts without messages."""

ID_DIGITS = 10
"""Maximum number of digits of a token id; no vocabulary needs more."""


def check_limits(body: GenerateRequest, limits: RequestLimits) -> None:
    """Raise `RequestError` for a body beyond the limits. The engine compiles a schema later, and may refuse it."""
    _at_most("n", body.n, limits.n)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    _at_most("the number of strings in stop", len(stops), limits.stop, "stop")
    _at_most("the length of a stop string", max(map(len, stops), default=0), limits.stop_chars, "stop")
    if not all(stops):
        raise RequestError("a stop string is empty; leave it out.", param="stop")
    _at_most("the number of stop_token_ids", len(body.stop_token_ids), limits.stop, "stop_token_ids")
    _at_most("the number of tokens in logit_bias", len(body.logit_bias), limits.logit_bias, "logit_bias")
    if body.threshold is not None and body.threshold_floor is not None:
        raise RequestError("give threshold or threshold_floor, not both.", param="threshold_floor")
    if isinstance(body, ChatCompletionRequest):
        check_messages(body.messages, limits)
        _at_most("top_logprobs", body.top_logprobs, limits.top_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
            raise RequestError("max_tokens and max_completion_tokens differ; give one.", param="max_tokens")
    if isinstance(body, CompletionRequest):
        _check_completion(body, limits)
        prompts = [*body.texts, *body.ids]
        _at_most("the number of prompts", len(prompts), limits.prompts, "prompt")
        _at_most("logprobs", body.logprobs, limits.top_logprobs)
        if not prompts or not (all(prompts) or body.suffix):
            raise RequestError("the prompt is empty; give at least one token.", param="prompt")
    _at_most("prompt_logprobs", body.prompt_logprobs, limits.top_logprobs)
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed; leave out stream.", param="prompt_logprobs")
    try:
        _grammar(body)
    except RequestError as error:
        raise RequestError(str(error), param="response_format") from error


def _check_completion(body: CompletionRequest, limits: RequestLimits) -> None:
    _at_most("best_of", body.best_of, limits.n)
    if body.candidates < body.n:
        raise RequestError(f"best_of is {body.best_of}; it must be at least n, {body.n}.", param="best_of")
    if body.stream and body.candidates > body.n:
        raise RequestError("best_of cannot be streamed; leave out stream.", param="best_of")
    if body.stream and body.echo and body.logprobs is not None:
        raise RequestError("echo with logprobs cannot be streamed; leave out stream.", param="echo")
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise RequestError("max_tokens is 0; it may be 0 only with echo or prompt_logprobs.", param="max_tokens")
    if body.suffix and body.ids:
        raise RequestError("suffix needs a prompt of text, not of token ids.", param="suffix")
    if body.suffix and body.echo:
        raise RequestError("suffix and echo exclude each other; leave one out.", param="suffix")


def check_messages(messages: Sequence[object], limits: RequestLimits) -> None:
    """Raise `RequestError` for a conversation that exceeds the limits."""
    _at_most("the number of messages", len(messages), limits.messages, "messages")


def check_translated(messages: Sequence[object]) -> None:
    """Raise `RequestError` for more messages than any conversation may have.

    The messages of a request of another API can be more than its items, so the form of that API does not bound them.
    """
    _at_most("the number of messages", len(messages), MESSAGES_MAX, "messages")


def check_text_length(texts: Iterable[str], model: ModelInfo, longest_token_bytes: int) -> None:
    """Raise a `PromptTooLongError`, without tokenising, for texts too long for the model under any tokenisation."""
    size = sum(len(text.encode()) for text in texts)
    most = model.engine.max_model_len * longest_token_bytes
    if size > most:
        raise PromptTooLongError(
            f"the prompt has {size} bytes; the model takes {model.engine.max_model_len} tokens, which are at most "
            f"{most} bytes. Shorten it."
        )


def engine_requests(
    body: GenerateRequest,
    prompts: list[list[int]],
    *,
    request_id: str,
    tenant: str,
    service_class: str,
    model: ModelInfo,
    limits: RequestLimits,
    default_mode: Mode,
    default_sampling: Mapping[str, Any],
    plan: AnswerPlan | None = None,
) -> list[Request]:
    """Return one engine request per prompt. Sampling parameters that the body leaves out come from `default_sampling`.

    `plan` is that of a chat answer.

    Raises `RequestError`.
    """
    _check_scores(body, sum(map(len, prompts)), limits)
    return [
        Request(
            id=f"{request_id}-{number}",
            prompt=tuple(prompt),
            tenant=tenant,
            service_class=service_class,
            session=_session(body, prompt, tenant),
            sampling=_sampling(body, len(prompt), model, limits, default_sampling, plan or AnswerPlan()),
            decode=DecodeParams(
                mode=Mode(body.mode) if body.mode else default_mode,
                threshold=body.threshold,
                floor=body.threshold_floor,
                block=body.block,
                adapter=model.adapter,
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


def _session(body: GenerateRequest, prompt: Sequence[int], tenant: str) -> str:
    """Return the key of the requests that begin like this one. Tenants share no cache, so they share no key."""
    beginning: Any = body.prompt_cache_key
    if beginning is None and isinstance(body, ChatCompletionRequest):
        roles = [message.role for message in body.messages]
        beginning = body.messages[: roles.index("user") + 1 if "user" in roles else 1]
    elif beginning is None:
        beginning = prompt[:BEGINNING_TOKENS]
    return blake2b(repr((tenant, beginning)).encode(), digest_size=16).hexdigest()


def lowered_max_tokens(body: GenerateRequest, requests: Sequence[Request]) -> int | None:
    """Return the lowest maximum tokens of the answers if it is below what the body sets, and None otherwise."""
    lowest = min(request.sampling.max_tokens for request in requests)
    return lowest if body.requested_tokens is not None and lowest < body.requested_tokens else None


def _sampling(
    body: GenerateRequest,
    prompt_tokens: int,
    model: ModelInfo,
    limits: RequestLimits,
    defaults: Mapping[str, Any],
    plan: AnswerPlan,
) -> SamplingParams:
    requested = body.requested_tokens
    only_scores = requested == 0
    longest = model.engine.max_model_len - (0 if only_scores else 1)
    longest = min(longest, limits.prompt_tokens or longest)
    if prompt_tokens > longest:
        reason = "" if only_scores else ", to leave room for an answer"
        raise PromptTooLongError(
            f"the prompt has {prompt_tokens} tokens; it may have up to {longest}{reason}. Shorten it."
        )
    most = min(limits.output_tokens, model.engine.max_model_len - prompt_tokens)
    if isinstance(body, ChatCompletionRequest):
        default = max(body.min_tokens, limits.default_output_tokens)
        logprobs = body.top_logprobs if body.logprobs else None
    else:
        assert isinstance(body, CompletionRequest)
        default = COMPLETION_TOKENS
        logprobs = 0 if body.logprobs is None and body.candidates > body.n else body.logprobs
    max_tokens = min(default if requested is None else requested, most)
    if body.min_tokens > max_tokens:
        advice = "Raise max_tokens, or lower min_tokens." if body.min_tokens <= most else "Lower min_tokens."
        raise RequestError(
            f"min_tokens is {body.min_tokens}; this answer may have up to {max_tokens} tokens. {advice}",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        **_chosen(body, defaults),
        seed=None if body.seed is None else body.seed % 2**63,
        n=body.candidates,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        stop_token_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=_scored(body),
        logit_bias=_bias(body.logit_bias),
        grammar=plan.grammar or _grammar(body),
        skip_special_tokens=plan.skip_special_tokens,
    )


def _check_scores(body: GenerateRequest, tokens: int, limits: RequestLimits) -> None:
    scored = _scored(body)
    entries = 0 if scored is None else tokens * (scored + 1)
    if entries > limits.prompt_scores:
        raise RequestError(
            f"the prompts have {entries} log-probabilities; this server returns at most {limits.prompt_scores}. "
            "Shorten them, or list fewer tokens.",
            param="prompt_logprobs",
        )


def _scored(body: GenerateRequest) -> int | None:
    return body.scored if isinstance(body, CompletionRequest) else body.prompt_logprobs


def _chosen(body: GenerateRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    top_k = None if body.top_k is None else max(0, body.top_k)
    fields = {name: getattr(body, name) for name in NUMBERS} | {"temperature": body.temperature, "top_k": top_k}
    return {**defaults, **{name: value for name, value in fields.items() if value is not None}}


def _grammar(body: GenerateRequest) -> GrammarSpec | None:
    match body.response_format:
        case JsonObjectFormat():
            return GrammarSpec(kind="json_object")
        case JsonSchemaFormat(json_schema=schema):
            return GrammarSpec(kind="json_schema", text=json.dumps(schema.enforced))
    return None


def _bias(biases: dict[str, float]) -> dict[int, float]:
    # `int` alone would also accept " 5" and "0_5".
    if not all(token.isascii() and token.isdecimal() and len(token) <= ID_DIGITS for token in biases):
        raise RequestError('the keys of logit_bias must be token ids, such as "42".', param="logit_bias")
    return {int(token): bias for token, bias in biases.items()}


def _at_most(name: str, value: int | None, most: int, param: str | None = None) -> None:
    if value is not None and value > most:
        raise RequestError(f"{name} is {value}; this server takes at most {most}.", param=param or name)
