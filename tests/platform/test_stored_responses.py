"""Stored responses, through OpenAI's client: continued, retrieved, listed, deleted, and shown to nobody else."""

from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from mars_ray.platform.responses.response_store import DAY_SECONDS, ResponseStore
from tests.serve.endpoint_clients import MODEL, check_error, http, settled
from tests.serve.endpoint_samples import ANSWER, MESSAGES, Keyed
from tests.serve.request_samples import RESPONSES
from tests.serve.tool_samples import WEATHER

ASKED = MESSAGES[0]["content"]
SECOND = "JSON with the keys name, age, city: Ann, 20, lives in Paris."
PLAIN: dict[str, Any] = {"model": MODEL, "max_output_tokens": 60, "temperature": 0}
TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER["function"]["parameters"], "strict": False}


@pytest.fixture
def ada(keyed: Keyed) -> OpenAI:
    return keyed.ada


@pytest.fixture
def bob(keyed: Keyed) -> OpenAI:
    return keyed.bob


def test_a_conversation_goes_on_as_if_every_item_had_been_sent_again(ada: OpenAI) -> None:
    first = ada.responses.create(**PLAIN, input=ASKED, instructions="Answer with JSON.")
    assert first.output_text == ANSWER
    second = ada.responses.create(**PLAIN, input=SECOND, previous_response_id=first.id)
    assert (second.previous_response_id, second.status) == (first.id, "completed")
    # The instructions of the first response are not among the items.
    sent = [{"role": "user", "content": ASKED}, *first.output, {"role": "user", "content": SECOND}]
    again = ada.responses.create(**PLAIN, input=sent, store=False)  # type: ignore[arg-type]
    assert second.usage and again.usage
    assert (second.output_text, second.usage.input_tokens) == (again.output_text, again.usage.input_tokens)


def test_a_streamed_response_with_a_call_is_stored_and_takes_the_calls_output(ada: OpenAI) -> None:
    fields: dict[str, Any] = PLAIN | {"max_output_tokens": 200, "tools": [TOOL], "tool_choice": "required"}
    with ada.responses.stream(**fields, input="What is the weather in Paris?") as stream:
        first = stream.get_final_response()
    [call] = first.output
    assert call.type == "function_call"
    retrieved = ada.responses.retrieve(first.id)
    assert (retrieved.id, retrieved.usage, retrieved.store) == (first.id, first.usage, True)  # type: ignore[attr-defined]
    assert [item.call_id for item in retrieved.output] == [call.call_id]  # type: ignore[union-attr]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "18"}
    second = ada.responses.create(**PLAIN, input=[output], previous_response_id=first.id)
    assert second.status in ("completed", "incomplete")
    assert [item.type for item in ada.responses.input_items.list(second.id, order="asc")] == [
        "message", "function_call", "function_call_output"
    ]  # fmt: skip


def test_input_items_are_listed_in_pages(ada: OpenAI) -> None:
    sent: Any = [{"role": "user", "content": f"{number}"} for number in range(5)]
    response = ada.responses.create(**PLAIN | {"max_output_tokens": 1}, input=sent)
    page = ada.responses.input_items.list(response.id, limit=2)
    assert (len(page.data), page.has_more) == (2, True)
    texts = [item.content[0].text for item in ada.responses.input_items.list(response.id, limit=2, order="asc")]  # type: ignore[union-attr,index]
    assert texts == ["0", "1", "2", "3", "4"]
    assert [item.content[0].text for item in page] == texts[::-1]  # type: ignore[union-attr,index]
    for wrong, param in (({"after": "x"}, "after"), ({"limit": 101}, "limit"), ({"order": "up"}, "order")):
        with pytest.raises(BadRequestError) as error:
            ada.responses.input_items.list(response.id, **wrong)  # type: ignore[arg-type]
        assert error.value.param == param


def test_a_deleted_response_is_gone(ada: OpenAI) -> None:
    response = ada.responses.create(**PLAIN | {"max_output_tokens": 1}, input="a")
    ada.responses.delete(response.id)
    for ask in (ada.responses.retrieve, ada.responses.delete, ada.responses.input_items.list):
        with pytest.raises(NotFoundError) as error:
            ask(response.id)
        assert error.value.code == "response_not_found"


def test_another_keys_response_reads_as_one_that_does_not_exist(ada: OpenAI, bob: OpenAI) -> None:
    response = ada.responses.create(**PLAIN | {"max_output_tokens": 1}, input="a")

    def refusals(id: str) -> list[str]:
        said = []
        for ask in (bob.responses.retrieve, bob.responses.delete, bob.responses.input_items.list):
            with pytest.raises(NotFoundError) as missing:
                ask(id)
            said.append(missing.value.response.text.replace(id, "ID"))
        with pytest.raises(BadRequestError) as refused:
            bob.responses.create(**PLAIN, input="a", previous_response_id=id)
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
        return [*said, refused.value.response.text.replace(id, "ID")]

    assert refusals(response.id) == refusals(f"resp_{'0' * 32}")
    assert ada.responses.retrieve(response.id).id == response.id


def test_an_expired_response_is_unknown(keyed: Keyed, ada: OpenAI) -> None:
    response = ada.responses.create(**PLAIN | {"max_output_tokens": 1}, input="a")
    keyed.served.platform.store.seconds += DAY_SECONDS
    with pytest.raises(NotFoundError):
        ada.responses.retrieve(response.id)
    with pytest.raises(BadRequestError, match="not found"):
        ada.responses.create(**PLAIN, input="a", previous_response_id=response.id)


def test_a_response_that_is_not_to_be_stored_does_not_touch_the_store(keyed: Keyed, ada: OpenAI) -> None:
    keyed.served.platform.store.calls.clear()
    response = ada.responses.create(**PLAIN | {"max_output_tokens": 1}, input="a", store=False)
    assert response.store is False  # type: ignore[attr-defined]
    with ada.responses.stream(**PLAIN | {"max_output_tokens": 1}, input="a", store=False) as stream:
        stream.until_done()
    assert keyed.served.platform.store.calls == []


def test_a_stream_that_its_caller_leaves_is_not_stored(keyed: Keyed, ada: OpenAI) -> None:
    keyed.served.platform.store.calls.clear()
    stream = ada.responses.create(**PLAIN | {"max_output_tokens": 4000}, input=ASKED, stream=True)
    next(iter(stream))
    stream.close()
    settled(keyed.served)
    assert keyed.served.platform.store.calls == []


def test_without_a_store_answers_come_all_the_same_and_say_that_they_are_not_stored(
    keyed: Keyed, ada: OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = ResponseStore(tmp_path / "store")
    lost.remove()
    monkeypatch.setattr(keyed.served.platform.store, "core", lost)
    response = ada.responses.create(**PLAIN, input=ASKED)
    assert (response.output_text, response.store) == (ANSWER, False)  # type: ignore[attr-defined]
    with ada.responses.stream(**PLAIN, input=ASKED) as stream:
        last = stream.get_final_response()
    assert (last.output_text, last.store) == (ANSWER, False)  # type: ignore[attr-defined]
    with http(keyed.served, keyed.keys[0]) as plain:
        for refused in (
            plain.post(RESPONSES, json=PLAIN | {"input": "a", "previous_response_id": "resp_1"}),
            plain.get(f"{RESPONSES}/resp_1"),
        ):
            assert "store of responses" in check_error(refused, 503, code="unavailable")
    settled(keyed.served)
