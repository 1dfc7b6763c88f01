"""Which grammars are refused and why, and that what a grammar allows depends on the tokens before alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.grammar.library import check_grammar
from mars_ray.engine.grammar.matcher import Grammars, Matcher
from mars_ray.engine.grammar.spec import GRAMMAR_CHARACTERS_MAX, GrammarSpec
from mars_ray.errors import RequestError
from mars_ray.model.checkpoint import Checkpoint
from tests.engine.grammar_samples import GRAMMARS, regex, schema
from tests.factories.engine import MakeEngine, request
from tests.samples import memory_mib


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
    with pytest.raises(RequestError, match="the kind of a grammar is 'gbnf'"):
        GrammarSpec(kind="gbnf", text="root ::= x")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"grammar is '\[0-9\]'; it must be a GrammarSpec"):
        request(1, [5], grammar="[0-9]")


def allowed_by(matcher: Matcher) -> list[int]:
    return [] if matcher.ended else [int(token) for token in matcher.allowed().nonzero()[0]]


@given(grammar=GRAMMARS, data=st.data())
def test_a_state_depends_on_its_tokens_and_not_on_how_they_were_reached(
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


def test_a_grammar_that_is_large_on_purpose_takes_little_memory(bundled: Checkpoint) -> None:
    grammars = Grammars(bundled, bundled.network.config.vocab_size)
    grammars.matcher(regex("a"), frozenset())
    before_mib = memory_mib()
    matchers = [grammars.matcher(regex(f"(a{{{1000 + number}}}){{1000}}"), frozenset()) for number in range(4)]
    assert all(matcher.allowed().any() for matcher in matchers)
    assert memory_mib() - before_mib < 4 * 40
