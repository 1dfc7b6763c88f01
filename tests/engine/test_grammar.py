"""Every answer is in its grammar, the same in every mode that promises it, and what is forced costs nothing."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from mars_ray.engine.core import engine as engine_module
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.grammar.library import check_grammar
from mars_ray.engine.grammar.matcher import Grammars, Matcher
from mars_ray.engine.grammar.spec import GRAMMAR_CHARACTERS_MAX, GrammarSpec
from mars_ray.engine.kv import slots as kv_rows
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.errors import RequestError
from mars_ray.method.metric import Metric
from mars_ray.model.checkpoint import Checkpoint
from tests.engine_samples import MakeEngine, Output, request, run

AR = DecodeParams(mode=Mode.AR)
EXACT = DecodeParams(mode=Mode.EXACT, threshold=0.3, block=8)
EAGER = DecodeParams(threshold=0.2, block=8)
"""Accepts most masks, so that the grammar is met in mid-walk."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value: object) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", text=json.dumps(value))


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text)


def alone(engine: Engine, prompt: tuple[int, ...], decode: DecodeParams, **sampling: object) -> Output:
    return run(engine, [request("it", prompt, decode, **sampling)])["it"]


def schema_of(answer: dict[str, object]) -> dict[str, object]:
    kinds = {str: "string", int: "integer", list: "array", dict: "object"}
    properties = {name: {"type": kinds[type(value)]} for name, value in answer.items()}
    return {"type": "object", "properties": properties, "required": [*answer], "additionalProperties": False}


def assert_in_grammar(text: str, grammar: GrammarSpec) -> None:
    match grammar.kind:
        case "regex":
            assert re.fullmatch(grammar.text, text), (grammar.text, text)
        case "json_object":
            assert isinstance(json.loads(text), dict)
        case _:
            jsonschema.validate(json.loads(text), json.loads(grammar.text))


LITERALS = st.text(alphabet="abcXYZ019 ,/é日\n", min_size=1, max_size=8).map(re.escape)
CLASSES = st.sampled_from(["[a-c]", "[0-9]", "[^a]", r"\d", "(yes|no)", "[A-Za-z ]"])
REGEXES = st.recursive(
    LITERALS | CLASSES,
    lambda inner: (
        st.lists(inner, min_size=2, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda each: f"({'|'.join(each)})")
        | st.tuples(inner, st.sampled_from(["+", "{1,3}", "{2}"])).map(lambda each: f"({each[0]}){each[1]}")
    ),
    max_leaves=6,
)
NAMES = st.text(alphabet='abcXYZ_ "é', min_size=1, max_size=8)
PLAIN_SCHEMAS: st.SearchStrategy[Any] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": ["integer", "null"]}),
    st.integers(0, 9).map(lambda length: {"type": "string", "maxLength": length}),
    st.tuples(st.integers(-99, 99), st.integers(0, 99)).map(
        lambda each: {"type": "integer", "minimum": each[0], "maximum": each[0] + each[1]}
    ),
    st.just({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    st.lists(NAMES | st.integers(0, 5), min_size=1, max_size=4, unique_by=str).map(lambda each: {"enum": each}),
    NAMES.map(lambda each: {"const": each}),
)
SCHEMAS = st.recursive(
    PLAIN_SCHEMAS,
    lambda inner: (
        st.tuples(inner, st.integers(0, 2)).map(
            lambda each: {"type": "array", "items": each[0], "minItems": each[1], "maxItems": 3}
        )
        | st.dictionaries(NAMES, inner, min_size=1, max_size=3).map(
            lambda each: {
                "type": "object",
                "properties": each,
                "required": list(each)[:2],
                "additionalProperties": False,
            }
        )
        | st.tuples(inner, st.just({"type": "null"})).map(lambda each: {"anyOf": list(each)})
    ),
    max_leaves=4,
)
GRAMMARS = REGEXES.map(regex) | SCHEMAS.map(schema) | st.just(GrammarSpec(kind="json_object"))
SAMPLINGS: list[dict[str, object]] = [
    {},
    {"temperature": 1.5, "seed": 5},
    {"temperature": 1.0, "seed": 1, "top_p": 0.9, "top_k": 40},
    {"frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.3, "logit_bias": {21: 2.0}},
    {"min_tokens": 9},
]


@given(
    grammar=GRAMMARS,
    which=st.integers(0, 503),
    sampling=st.sampled_from(SAMPLINGS),
    logprobs=st.sampled_from((None, 0)),
    block=st.integers(1, 8),
)
@settings(max_examples=60)
def test_every_complete_answer_is_in_its_grammar_and_exact_mode_says_what_autoregressive_decoding_says(
    make_engine: MakeEngine,
    prompts: list[tuple[int, ...]],
    grammar: GrammarSpec,
    which: int,
    sampling: dict[str, object],
    logprobs: int | None,
    block: int,
) -> None:
    asked = {"max_tokens": 60, "grammar": grammar} | sampling
    exact = DecodeParams(mode=Mode.EXACT, threshold=0.3, block=block)
    engine = make_engine()
    said = [
        alone(engine, prompts[which], AR, **asked),
        alone(engine, prompts[which], exact, **asked, logprobs=logprobs),
        alone(engine, prompts[which], EAGER, **asked, logprobs=logprobs),
    ]
    assert said[0].tokens == said[1].tokens
    for output in said:
        assert output.finished.reason in ("stop", "length"), output.finished.error
        assert output.finished.reason == "stop" or len(output.tokens) == 60
        assert not output.logprobs or len(output.logprobs) == len(output.tokens)
        if output.finished.reason == "stop":
            assert_in_grammar(output.text, grammar)


@pytest.mark.parametrize(
    "decode",
    [
        AR,
        EAGER,
        EXACT,
        DecodeParams(threshold=3.0, metric=Metric.ENTROPY, block=6),
        DecodeParams(threshold=0.1, metric=Metric.MARGIN, block=6),
    ],
    ids=lambda each: f"{each.mode}-{each.metric}",
)
def test_prompts_that_ask_for_something_else_are_answered_in_the_schema(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], decode: DecodeParams
) -> None:
    asked = [request(n, p, decode, max_tokens=90, grammar=schema(PERSON)) for n, p in enumerate(prompts[::12])]
    outputs = run(make_engine(), asked).values()
    complete = [each for each in outputs if each.finished.reason == "stop"]
    assert len(complete) > 0.9 * len(outputs)
    for output in complete:
        jsonschema.validate(json.loads(output.text), PERSON)


def test_what_is_forced_takes_no_forward(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    long = "the quick brown fox jumps over the lazy dog " * 4
    grammar = schema(
        {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": long}], "minItems": 2, "items": False}
    )
    output = alone(make_engine(), prompts[0], DecodeParams(threshold=1.0), max_tokens=400, grammar=grammar)
    assert json.loads(output.text)[1] == long
    assert output.finished.reason == "stop"
    assert output.finished.forwards == 1 < 40 < len(output.tokens)


def test_a_schema_costs_no_tokens_per_forward(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    decode, per_forward = DecodeParams(threshold=0.95, block=8), []
    free = run(make_engine(), [request(n, p, decode, max_tokens=64) for n, p in enumerate(prompts)])
    answers = {name: json.loads(each.text) for name, each in free.items() if each.text.startswith("{")}
    assert len(answers) > 30
    for bound in (False, True):
        asked = [
            request(
                name, prompts[int(name)], decode, max_tokens=64, grammar=schema(schema_of(answer)) if bound else None
            )
            for name, answer in answers.items()
        ]
        outputs = run(make_engine(), asked)
        assert {name: json.loads(each.text) for name, each in outputs.items()} == answers
        per_forward.append(
            sum(len(each.tokens) for each in outputs.values())
            / sum(each.finished.forwards for each in outputs.values())
        )
    assert per_forward[1] >= per_forward[0]


def test_a_text_that_is_forced_as_a_whole_takes_one_forward(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    output = alone(make_engine(), prompts[0], AR, max_tokens=400, grammar=regex("all of this, whatever you say"))
    assert (output.text, output.finished.reason) == ("all of this, whatever you say", "stop")
    assert output.finished.forwards == 1


def test_forced_tokens_have_the_log_probabilities_of_the_model_where_they_are_asked_for(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    asked = {"max_tokens": 60, "grammar": schema(PERSON)}
    for decode in (AR, EXACT):
        silent = alone(make_engine(), prompts[0], decode, **asked)
        output = alone(make_engine(), prompts[0], decode, **asked, logprobs=1)
        assert output.tokens == silent.tokens
        assert len(output.logprobs) == len(output.tokens)
        unlikely = [each.chosen for each in output.logprobs if each.chosen < -1]
        assert unlikely, "the model would not have said all of this"


def test_a_draw_is_one_from_the_allowed_tokens(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], oracle: Checkpoint, grammars: Grammars
) -> None:
    with torch.inference_mode():
        logits_V = oracle.network(torch.tensor([prompts[430]])).logits[0, -1].double() / 6
    likely = oracle.tokenizer.decode(logits_V.topk(4).indices)
    grammar = regex(f"[^{re.escape(likely)}].*")
    allowed_V = torch.from_numpy(grammars.matcher(grammar, oracle.stop_ids).allowed())
    share_V = logits_V.softmax(dim=-1).masked_fill(~allowed_V, 0)
    assert 0.2 < share_V.sum() < 0.8, "some draws are the first, some the second"
    asked = [request(n, prompts[430], AR, max_tokens=1, temperature=6.0, seed=n, grammar=grammar) for n in range(1000)]
    said = [output.tokens[0] for output in run(make_engine(), asked).values()]
    # Tokens side by side are counted together, ten groups of about equal chances.
    group_V = (share_V.cumsum(dim=0) / share_V.sum() * 9.999).long()
    expected = torch.bincount(group_V, weights=share_V / share_V.sum() * 1000, minlength=10).tolist()
    drawn = Counter(int(group_V[token]) for token in said)
    assert chisquare([drawn[group] for group in range(10)], expected).pvalue > 1e-4


def test_neighbours_without_a_grammar_say_what_they_say_alone(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    free = [request(f"free-{n}", p, EAGER, max_tokens=40) for n, p in enumerate(prompts[::50])]
    bound = [request(n, p, EXACT, max_tokens=40, grammar=schema(PERSON)) for n, p in enumerate(prompts[7::50])]
    alone_, together = run(make_engine(), free), run(make_engine(rows=8), [*bound, *free])
    assert {name: together[name].tokens for name in alone_} == {name: each.tokens for name, each in alone_.items()}


def test_a_sequence_that_gives_its_row_back_keeps_its_place_in_the_grammar(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_rows, "FIRST_WIDTH", 32)
    asked = [
        request(n, prompts[n * 40], decode, max_tokens=60, grammar=schema(PERSON))
        for n, decode in enumerate([AR, EXACT, EAGER] * 4)
    ]
    roomy, narrow = make_engine(), make_engine(rows=4, kv_tokens=192)
    expected, outputs = run(roomy, asked), run(narrow, asked)
    assert narrow.preemptions > roomy.preemptions == 0
    assert {name: each.tokens for name, each in outputs.items()} == {n: each.tokens for n, each in expected.items()}


@pytest.mark.parametrize("decode", [AR, EAGER, EXACT], ids=lambda each: str(each.mode))
def test_limits_and_stops_work_inside_a_grammar(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], decode: DecodeParams
) -> None:
    digits = {"grammar": regex("[0-9]+"), "max_tokens": 30}
    cut = alone(make_engine(), prompts[0], decode, grammar=regex("x{99}"), max_tokens=7)
    assert (len(cut.tokens), cut.finished.reason) == (7, "length")
    later = alone(make_engine(), prompts[0], decode, **digits, min_tokens=20)
    assert len(later.tokens) >= 20
    before = alone(make_engine(), prompts[0], decode, grammar=regex("one, two, three"), stop=(", th",))
    assert (before.text, before.finished.reason) == ("one, two", "stop")
    endless = alone(make_engine(), prompts[0], decode, **digits, ignore_eos=True)
    assert (len(endless.tokens), endless.finished.reason) == (30, "length")
    several = run(make_engine(), [request("n", prompts[0], decode, **digits, n=3, seed=1, temperature=3.0)])
    assert all(re.fullmatch("[0-9]+", each.text) for each in several.values())


@pytest.mark.parametrize("decode", [EAGER, EXACT], ids=lambda each: str(each.mode))
def test_the_audit_does_not_take_a_grammar_for_the_model(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], decode: DecodeParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "AUDIT_EVERY", 1)
    engine = make_engine()
    run(engine, [request(n, p, decode, max_tokens=40, grammar=schema(PERSON)) for n, p in enumerate(prompts[::50])])
    assert all(point.audited == 0 for point in engine.profile.points())
    run(engine, [request(n, p, decode, max_tokens=40) for n, p in enumerate(prompts[::50])])
    assert any(point.audited > 0 for point in engine.profile.points())


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (GrammarSpec(kind="json_schema", text="{"), "json_schema cannot be used: EOF"),
        (GrammarSpec(kind="json_schema", text="true"), "Expecting object schema"),
        (schema({"type": "strin"}), "Invalid type: strin"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"$ref": "https://example.org/schema"}), "example.org"),
        (schema({"type": "integer", "minimum": 5, "maximum": 4}), "minimum"),
        (regex("(a"), "regex cannot be used.*unclosed group"),
        (regex("a(?=b)"), "look-around"),
        (regex("\ud800"), "surrogates not allowed"),
        (GrammarSpec(kind="json_schema", text="[" * 10_000), "recursion limit"),
        (
            schema(
                {
                    "type": "object",
                    "allOf": [
                        {"anyOf": [{"properties": {f"p{i}{j}": {"const": j}}} for j in range(4)]} for i in range(8)
                    ],
                }
            ),
            "too large",
        ),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_with_the_reason_before_any_work(
    make_engine: MakeEngine, grammar: GrammarSpec, reason: str
) -> None:
    engine = make_engine()
    for refuse in (check_grammar, lambda spec: engine.add(request(1, [5], grammar=spec))):
        with pytest.raises(RequestError, match=reason) as refused:
            refuse(grammar)
        assert len(str(refused.value)) < 400
    assert not engine.busy


@pytest.mark.parametrize("grammar", [regex(""), regex(r"[^\x00-\x{10FFFF}]")])
def test_a_grammar_without_a_text_is_refused(make_engine: MakeEngine, grammar: GrammarSpec) -> None:
    with pytest.raises(RequestError, match="regex cannot be used"):
        make_engine().add(request(1, [5], grammar=grammar))


def test_a_grammar_that_is_too_long_or_of_no_known_kind_is_refused() -> None:
    regex("a" * GRAMMAR_CHARACTERS_MAX)
    with pytest.raises(RequestError, match=f"{GRAMMAR_CHARACTERS_MAX + 1} characters"):
        regex("a" * (GRAMMAR_CHARACTERS_MAX + 1))
    with pytest.raises(RequestError, match="the kind of a grammar is 'lark'"):
        GrammarSpec(kind="lark", text="start: x")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="grammar is str"):
        request(1, [5], grammar="[0-9]")


def allowed_by(matcher: Matcher) -> list[int]:
    return [] if matcher.ended else [int(token) for token in matcher.allowed().nonzero()[0]]


@given(grammar=GRAMMARS, data=st.data())
@settings(max_examples=60)
def test_a_state_depends_on_its_tokens_and_not_on_the_road_there(
    bundled: Checkpoint, grammars: Grammars, grammar: GrammarSpec, data: st.DataObject
) -> None:
    stops = bundled.stop_ids
    wandering, straight = grammars.matcher(grammar, stops), grammars.matcher(grammar, stops)
    for _ in range(8):
        tokens = list(wandering.ahead)
        wandering.take_forced(data.draw(st.integers(0, 5)))
        if choice := sorted(set(allowed_by(wandering)) - stops):
            wandering.take(data.draw(st.sampled_from(choice)))
        tokens = wandering.ahead[: data.draw(st.integers(0, len(wandering.ahead)))]
        wandering.seek(tokens)
        straight.seek([])
        for token in tokens:
            straight.forced()
            assert straight.take(token)
        assert (wandering.forced(), wandering.ended) == (straight.forced(), straight.ended)
        assert allowed_by(wandering) == allowed_by(straight)


@pytest.fixture(scope="module")
def grammars(bundled: Checkpoint) -> Grammars:
    return Grammars(bundled, bundled.network.config.vocab_size)


def own_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def test_a_grammar_that_is_large_on_purpose_takes_little_memory(bundled: Checkpoint) -> None:
    grammars = Grammars(bundled, bundled.network.config.vocab_size)
    grammars.matcher(regex("a"), frozenset())
    before_mib = own_mib()
    matchers = [grammars.matcher(regex(f"(a{{{1000 + number}}}){{1000}}"), frozenset()) for number in range(4)]
    assert all(matcher.allowed().any() for matcher in matchers)
    assert own_mib() - before_mib < 4 * 40
