"""A stream that loses its engines goes on elsewhere: together the chunks are the answer that one engine gives."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, PartialAnswer, Request, SamplingParams
from mars_ray.errors import ReplicaLostError, RequestError
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.openai_api.usage import ResponseUsage
from mars_ray.serve.http.engine_calls import EngineCalls
from mars_ray.serve.replicas.engine_client import Take
from tests.engine.grammar_samples import regex, schema
from tests.factories.engine import MakeEngine, Output, collect, engine_of

TELL = [
    "JSON with the keys name, age, city: Oscar, 34, lives in Dallas.",
    "Ann, Bob, Eve: put them in a numbered list.",
    "Tell me about Ann.",
]
PERSON = schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer"},
            "fine": {"const": True},
        },
        "required": ["name", "age", "fine"],
        "additionalProperties": False,
    }
)
CALL = GrammarSpec(
    kind="lark", text='start: TEXT "<call>" ARGUMENTS "</call>"\nTEXT: /[a-z ]{1,12}/\nARGUMENTS: /[0-9é]{1,9}/'
)
GRAMMARS = (None, None, PERSON, CALL, regex("(yes|no), [a-f]{3,20}!"))


@pytest.fixture(scope="module")
def make_engine(bundled: Checkpoint) -> MakeEngine:
    return partial(engine_of, bundled)


@pytest.fixture(scope="module")
def prompts(bundled: Checkpoint) -> list[tuple[int, ...]]:
    encoder = ChatEncoder(bundled.tokenizer)
    return [tuple(encoder.prompt([{"role": "user", "content": text}])) for text in TELL]


SAMPLINGS = st.builds(
    SamplingParams,
    max_tokens=st.integers(2, 40),
    min_tokens=st.sampled_from([0, 2]),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 2]),
    stop=st.sampled_from([(), (), ("an", "34"), ('": "', "\n")]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 2]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    grammar=st.sampled_from(GRAMMARS),
)


def answers(
    make_engine: MakeEngine, request: Request, lives: Sequence[int], limit: int = 9
) -> tuple[dict[int, Output], ResponseUsage]:
    """Return the answers of engines that die after so many chunks each, the last of which lives."""
    left = list(lives)
    usage = ResponseUsage(prompt_tokens=len(request.prompt))

    async def generate(request: Request, take: Take) -> None:
        engine = make_engine()
        engine.add(request)
        life = left.pop(0) if left else None
        sent = 0
        while engine.busy:
            for chunk in engine.step():
                if sent == life:
                    raise ReplicaLostError("it died")
                sent += 1
                await take([chunk])
        if sent == life:
            raise ReplicaLostError("it died after the last chunk")

    outputs: dict[tuple[str, int], Output] = {}

    async def read(part: Sequence[Chunk]) -> None:
        for chunk in part:
            usage.add(chunk)
            collect(outputs, [replace(chunk, request_id=request.id)])  # each engine has its own

    client: Any = SimpleNamespace(generate=generate)
    asyncio.run(EngineCalls(client, limit).stream(request, read, usage))
    return {index: output for (_, index), output in outputs.items()}, usage


@given(
    which=st.integers(0, len(TELL) - 1),
    sampling=SAMPLINGS,
    mode=st.sampled_from([Mode.AR, Mode.EXACT]),
    lives=st.lists(st.integers(1, 20), min_size=1, max_size=3),
)
def test_an_answer_cut_anywhere_goes_on_as_if_nothing_had_happened(
    which: int,
    sampling: SamplingParams,
    mode: Mode,
    lives: list[int],
    make_engine: MakeEngine,
    prompts: list[tuple[int, ...]],
) -> None:
    request = Request(id="r", prompt=prompts[which], sampling=sampling, decode=DecodeParams(mode=mode))
    whole, once = answers(make_engine, request, [])
    moved, usage = answers(make_engine, request, lives)
    assert moved.keys() == whole.keys()
    for index, output in moved.items():
        expected = whole[index]
        assert (output.tokens, output.text) == (expected.tokens, expected.text)
        assert output.finished.reason == expected.finished.reason
        assert output.finished.tokens == len(output.tokens)
        assert output.finished.forwards == sum(bool(chunk.tokens) for chunk in output.chunks)
        assert [each.start for each in output.logprobs] == [each.start for each in expected.logprobs]
        for each, other in zip(output.logprobs, expected.logprobs, strict=True):
            assert each.chosen == pytest.approx(other.chosen, abs=1e-4)
            assert dict(each.top) == pytest.approx(dict(other.top), abs=1e-4)
        if mode is Mode.AR:
            assert [each.forward for each in output.logprobs] == [each.forward for each in expected.logprobs]
    assert (usage.prompt_tokens, usage.tokens) == (once.prompt_tokens, once.tokens)


def request_of(prompt: tuple[int, ...]) -> Request:
    return Request(id="r", prompt=prompt, sampling=SamplingParams(max_tokens=12, ignore_eos=True))


@pytest.mark.parametrize(("limit", "ends"), [(0, True), (1, True), (2, False)])
def test_a_stream_moves_so_many_times_and_is_counted(
    limit: int, ends: bool, make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    run: Callable[[], tuple[dict[int, Output], ResponseUsage]] = partial(
        answers, make_engine, request_of(prompts[2]), [2, 2], limit
    )
    if ends:
        with pytest.raises(ReplicaLostError, match="it died"):
            run()
    else:
        assert run()[1].migrations == 2


@pytest.mark.parametrize(
    ("index", "tokens", "reason"),
    [
        (1, (), "has the index 1"),
        (0, (10**6,), "holds token 1000000"),
        (0, (40,) * 12, "has 12 tokens; .* may have 12"),
    ],
)
def test_an_engine_refuses_a_partial_answer_that_cannot_go_on(
    index: int, tokens: tuple[int, ...], reason: str, make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    whole = request_of(prompts[0])
    request = Request(
        id="r", prompt=whole.prompt, sampling=whole.sampling, partial_answers={index: PartialAnswer(tokens)}
    )
    with pytest.raises(RequestError, match=f"a partial answer {reason}"):
        make_engine().add(request)
