"""Requests that begin alike have one session, by which a router finds the engine that has their beginning cached."""

from typing import Any

import pytest

from mars_ray.engine.mode import Mode
from mars_ray.engine.process.messages import EngineFacts
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.openai_api.protocol import ChatCompletionRequest, CompletionRequest
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.openai_api.translate import BEGINNING_TOKENS, engine_requests

FACTS = EngineFacts(max_model_len=200, vocab_size=100, block=1, token_bytes=(b"a",) * 100)
SYSTEM = {"role": "system", "content": "be brief"}


def asks(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def session(messages: list[dict[str, Any]], tenant: str = "ada", **fields: Any) -> str:
    return of(ChatCompletionRequest.model_validate({"messages": messages} | fields), [1, 2, 3], tenant)


def of(body: ChatCompletionRequest | CompletionRequest, prompt: list[int], tenant: str = "ada") -> str:
    [request] = engine_requests(
        body,
        [prompt],
        request_id="r",
        tenant=tenant,
        service_class="standard",
        model=ModelInfo(name="m", created=0, engine=FACTS),
        limits=RequestLimits(),
        default_mode=Mode.THRESHOLD,
        default_sampling={},
    )
    return request.session


def test_a_conversation_keeps_its_session() -> None:
    first = [SYSTEM, asks("hello")]
    later = [*first, {"role": "assistant", "content": "hi"}, asks("and now?")]
    assert session(first) == session(later)
    assert session(first) != session([SYSTEM, asks("good day")]) != session([asks("good day")])


def test_a_conversation_that_no_user_began_has_a_session_too() -> None:
    assert session([SYSTEM]) == session([SYSTEM, {"role": "assistant", "content": "yes?"}])


def test_tenants_share_no_session() -> None:
    assert session([asks("hello")]) != session([asks("hello")], tenant="bob")


def test_a_key_of_the_caller_decides() -> None:
    keyed = [session([asks(text)], prompt_cache_key="shop") for text in ("a", "b")]
    assert keyed[0] == keyed[1] != session([asks("a")])
    assert session([asks("a")], tenant="bob", prompt_cache_key="shop") != keyed[0]


@pytest.mark.parametrize(("same", "differs_at"), [(True, BEGINNING_TOKENS), (False, BEGINNING_TOKENS - 1)])
def test_a_prompt_without_messages_is_known_by_its_first_tokens(same: bool, differs_at: int) -> None:
    body = CompletionRequest.model_validate({"prompt": "text"})
    one, other = list(range(100)), list(range(100))
    other[differs_at] = 7
    assert (of(body, one) == of(body, other)) is same
