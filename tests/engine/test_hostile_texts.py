"""Texts that repeat endlessly, or never, take bounded work and memory, and are answered as one token at a time."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from mars_ray.engine.drafting.text_drafter import (
    DRAFTS_MOST,
    PROMPT_TOKENS_PER_STEP,
    SequenceText,
    TextDrafter,
)
from mars_ray.engine.drafting.text_index import LONGEST, TextIndex
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.model.checkpoint import Checkpoint
from tests.engine.grammar_samples import regex
from tests.factories.engine import MakeEngine, request, run

TOKENS = 100_000


class Counted(list[int]):
    """Tokens that count how many of them were read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(index)
        self.read += len(value) if isinstance(index, slice) else 1
        return value


def repeated(count: int) -> list[int]:
    return [7] * count


def alternating(count: int) -> list[int]:
    return [7 + number % 2 for number in range(count)]


def noise(count: int) -> list[int]:
    draw = random.Random(0)
    return [draw.randrange(256) for _ in range(count)]


TEXTS = pytest.mark.parametrize("text", [repeated, alternating, noise], ids=lambda text: text.__name__)


@TEXTS
def test_a_draft_reads_a_bounded_number_of_tokens_of_a_long_prompt(text: Callable[[int], list[int]]) -> None:
    prompt, drafter, indexes = Counted(text(TOKENS)), TextDrafter(), SequenceText(TextIndex())
    drafter.ended("ada", text(1000))
    tokens = Counted(prompt)
    for step in range(TOKENS // PROMPT_TOKENS_PER_STEP + 2):
        prompt.read = tokens.read = 0
        draft = drafter.draft(indexes, prompt, tokens, "ada", 0.0, DRAFTS_MOST)
        assert len(draft.tokens) <= DRAFTS_MOST
        assert prompt.read <= PROMPT_TOKENS_PER_STEP
        assert tokens.read <= 2 * LONGEST
        tokens.append(prompt[step])
    assert len(indexes.prompt.tokens) == TOKENS


def test_a_prompt_of_one_repeated_token_is_drafted_as_far_as_a_draft_may_go() -> None:
    prompt = repeated(TOKENS)
    draft = TextDrafter().draft(SequenceText(TextIndex()), prompt, prompt, None, 0.0, DRAFTS_MOST)
    assert draft.tokens == repeated(DRAFTS_MOST)


def hostile_prompts(tokenizer: Any, length: int) -> list[list[int]]:
    """Return prompts of `length` tokens: repeated tokens, and binary noise as text."""
    binary = random.Random(1).randbytes(4 * length).decode("latin-1")
    return [repeated(length), alternating(length), tokenizer(binary, add_special_tokens=False)["input_ids"][:length]]


@pytest.mark.parametrize(
    "sampling", [{}, {"grammar": regex(r"[a-z ]{9}(\.|, and so on and so on)*")}], ids=["", "grammar"]
)
def test_an_engine_answers_prompts_as_long_as_its_context_as_one_token_at_a_time(
    make_engine: MakeEngine, bundled: Checkpoint, sampling: dict[str, Any]
) -> None:
    room = 24
    engines = {mode: make_engine(max_num_seqs=2) for mode in (Mode.AR, Mode.EXACT)}
    prompts = hostile_prompts(bundled.tokenizer, engines[Mode.AR].limits.max_model_len - room)
    answers = {}
    for mode, engine in engines.items():
        decode = DecodeParams(mode=mode)
        asked = [request(n, p, decode, max_tokens=room, **sampling) for n, p in enumerate(prompts)]
        outputs = run(engine, asked)
        answers[mode] = {name: (output.tokens, output.finished.reason) for name, output in outputs.items()}
        forwards = sum(output.finished.forwards for output in outputs.values())
        assert sum(counts.drafted for counts in engine.state().drafts) <= forwards * DRAFTS_MOST
    assert answers[Mode.EXACT] == answers[Mode.AR]
    assert "text" in [counts.source for counts in engines[Mode.EXACT].state().drafts]
    assert "text" not in [counts.source for counts in engines[Mode.AR].state().drafts]
