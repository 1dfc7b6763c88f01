"""Drafts within a grammar are chains of forced tokens and copies. They save forwards and change no answer."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.core.engine import Engine
from mars_ray.engine.drafting.text_drafter import DRAFTS_MOST, SequenceText, TextDraft, TextDrafter
from mars_ray.engine.drafting.text_index import TextIndex
from mars_ray.engine.grammar.matcher import Grammars, Matcher
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, Request
from mars_ray.engine.stats.state import DraftCounts
from mars_ray.method.drafts import PositionPrice
from mars_ray.model.checkpoint import Checkpoint
from tests.engine.grammar_samples import GRAMMARS, regex, schema
from tests.factories.engine import MakeEngine, Output, request, run

AR, EXACT = DecodeParams(mode=Mode.AR), DecodeParams(mode=Mode.EXACT)

ROW: dict[str, Any] = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "occupation": {"type": "string", "maxLength": 20},
        "is_new": {"type": "boolean"},
    },
    "required": ["first_name", "occupation", "is_new"],
    "additionalProperties": False,
}


class Chains:
    """Drafts of one sequence within a grammar, in the tokens of the bundled model."""

    def __init__(self, checkpoint: Checkpoint, grammars: Grammars, grammar: GrammarSpec) -> None:
        self._tokenizer = checkpoint.tokenizer
        self.matcher: Matcher = grammars.matcher(grammar, checkpoint.stop_ids)
        self.drafter = TextDrafter()

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def draft(self, prompt: str, answer: Sequence[int], most: int = DRAFTS_MOST) -> TextDraft:
        """Return the drafts after the tokens of an answer."""
        self.matcher.seek(list(answer))
        self.matcher.settle()
        before = self.tokens(prompt)
        return self.drafter.draft(
            SequenceText(TextIndex()), before, [*before, *answer], "ada", 0.0, most, grammar=self.matcher
        )

    def text(self, draft: TextDraft) -> str:
        """Return the text of a draft."""
        return str(self._tokenizer.decode(draft.tokens))


def test_a_chain_goes_on_with_forced_tokens_and_with_the_copy_after_them(
    bundled: Checkpoint, grammars: Grammars
) -> None:
    chains = Chains(bundled, grammars, regex(r"[a-z ]{18}; and this was then: [a-z ]{4}; the end"))
    start = chains.tokens("one two three")
    draft = chains.draft("one two three four, and this was then: blue and red", start)
    assert chains.text(draft) == " four; and this was then: blue; the end"
    by_token = zip(draft.tokens, draft.confidences, draft.features, strict=True)
    assert all((confidence == 1) == (features is None) for _, confidence, features in by_token)
    is_forced = [features is None for features in draft.features]
    assert [source for source, _ in groupby(is_forced)] == [False, True, False, True]


def test_drafts_within_a_grammar_are_allowed_and_leave_it_where_it_was(bundled: Checkpoint, grammars: Grammars) -> None:
    chains = Chains(bundled, grammars, regex(r"[a-z ]{30}"))
    letters = chains.tokens("all of this again and again")
    draft = chains.draft("all of this again and again 4 times, all of this", letters[:4])
    assert draft.tokens[: len(letters) - 4] == letters[4:]
    assert "4" not in chains.text(draft)
    assert not chains.matcher.ahead
    assert chains.matcher.allowed()[draft.tokens[0]]
    for token in draft.tokens:
        assert chains.matcher.take(token)


def test_a_chain_is_no_longer_than_allowed(bundled: Checkpoint, grammars: Grammars) -> None:
    chains = Chains(bundled, grammars, regex("(a|b) text that is forced as a whole, from its second letter on"))
    assert len(chains.draft("", chains.tokens("a"), most=5).tokens) == 5


def test_forced_tokens_gain_nothing_and_cut_nothing() -> None:
    draft = TextDraft([1, 2, 3, 4], [1.0, 0.5, 1.0, 0.1], [None, (1.0,), None, (1.0,)])
    assert draft.worth(PositionPrice(0.2)) == (3, 0.5 - 0.2)
    assert draft.first(1).worth(PositionPrice(0.2)) == (1, 0.0)


def answers(outputs: dict[str, Output]) -> dict[str, Any]:
    return {name: (each.tokens, each.text, each.finished.reason) for name, each in outputs.items()}


def one_by_one(requests: list[Request]) -> list[Request]:
    return [replace(one, decode=AR) for one in requests]


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.3, "top_p": 0.9},
    {"frequency_penalty": 0.5},
    {"logprobs": 1},
    {"logprobs": 0, "temperature": 1.0, "seed": 4, "min_tokens": 9},
    {"n": 2, "temperature": 1.0, "seed": 9},
    {"stop": ("e", '",')},
]


@given(
    grammar=GRAMMARS | st.just(schema(ROW)),
    which=st.integers(0, 503),
    sampling=st.sampled_from(SAMPLINGS),
    block=st.sampled_from((None, 1, 4)),
)
def test_exact_answers_are_those_of_one_token_at_a_time(
    make_engine: MakeEngine,
    prompts: list[tuple[int, ...]],
    grammar: GrammarSpec,
    which: int,
    sampling: dict[str, Any],
    block: int | None,
) -> None:
    first = request("first", prompts[which], AR, max_tokens=40, grammar=grammar)
    answer = run(make_engine(), [first])["first"].tokens
    prompt = (*prompts[which], *answer, *prompts[which])  # an answer to copy from, with tokens that were forced
    exact = DecodeParams(mode=Mode.EXACT, block=block)
    asked = [request(number, prompt[number:], exact, max_tokens=40, grammar=grammar, **sampling) for number in range(2)]
    engine = make_engine(max_num_seqs=2)
    expected = run(make_engine(), one_by_one(asked))
    for _ in range(2):  # the second time, recent answers draft
        outputs = run(engine, asked)
        assert answers(outputs) == answers(expected)
        for name, output in outputs.items():
            chosen = [one.chosen for one in output.logprobs]
            assert chosen == pytest.approx([one.chosen for one in expected[name].logprobs], abs=2e-3)


@pytest.fixture
def rows(prompts: list[tuple[int, ...]]) -> list[Request]:
    return [request(n, prompt, EXACT, max_tokens=80, grammar=schema(ROW)) for n, prompt in enumerate(prompts[::60])]


def test_rows_of_one_schema_take_fewer_forwards_and_say_the_same(make_engine: MakeEngine, rows: list[Request]) -> None:
    engine = make_engine(max_num_seqs=1)
    first, second, alone = run(engine, rows), run(engine, rows), run(make_engine(), one_by_one(rows))
    assert answers(first) == answers(second) == answers(alone)
    assert all(json.loads(each.text) for each in alone.values() if each.finished.reason == "stop")
    forwards = [sum(each.finished.forwards for each in outputs.values()) for outputs in (second, first, alone)]
    assert forwards[0] < 0.7 * forwards[1] < 0.7 * forwards[2]


def counts_of(engine: Engine) -> dict[str, DraftCounts]:
    return {counts.source: counts for counts in engine.state().drafts}


def test_drafts_of_a_chain_are_counted_by_source(make_engine: MakeEngine, rows: list[Request]) -> None:
    engine, alone = make_engine(max_num_seqs=1), make_engine(max_num_seqs=1)
    for _ in range(2):
        run(engine, [replace(row, decode=replace(EXACT, block=1)) for row in rows])
        run(alone, one_by_one(rows))
    chained, first = counts_of(engine), counts_of(alone)
    assert set(chained) == {"text", "grammar"}
    assert set(first) == {"grammar"}, "one token at a time drafts only what is forced behind a prompt"
    assert 0 < chained["text"].right < chained["text"].drafted
    assert chained["grammar"].right > first["grammar"].right
