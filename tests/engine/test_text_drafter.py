"""Drafts from text: what follows the longest match, from the sequence's own text or its owner's recent answers."""

from collections.abc import Hashable

from mars_ray.engine.drafting.text_drafter import (
    DRAFTS_MOST,
    FIRST_REST,
    LONGEST_REST,
    PROMPT_TOKENS_PER_STEP,
    TRIAL_DRAFTS,
    SequenceText,
    TextDraft,
    TextDrafter,
)
from mars_ray.engine.drafting.text_index import TextIndex
from mars_ray.method.drafts import PositionPrice

WORDS = list(range(100, 160))
PRICE = PositionPrice(0.2)


def drafted(drafter: TextDrafter, prompt: list[int], answer: list[int], key: Hashable = None) -> TextDraft:
    text = SequenceText(TextIndex())
    return drafter.draft(text, prompt, prompt + answer, key, temperature=0.0, most=DRAFTS_MOST)


def test_a_sequence_that_copies_its_prompt_gets_what_follows_there() -> None:
    draft = drafted(TextDrafter(), WORDS, [1, *WORDS[10:20]])
    assert draft.tokens == WORDS[20 : 20 + DRAFTS_MOST]


def test_the_answer_is_copied_if_its_match_is_the_longer_one() -> None:
    draft = drafted(TextDrafter(), [8, 1, 2, 3, 4], [9, 1, 2, 3, 5, 6, 9, 1, 2, 3])
    assert draft.tokens[:2] == [5, 6]


def test_recent_answers_draft_for_sequences_with_their_key_only() -> None:
    drafter = TextDrafter()
    drafter.ended("ada", WORDS)
    assert not drafted(drafter, [1], WORDS[:5], "bob").tokens
    assert not drafted(drafter, [1], WORDS[:5]).tokens
    draft = drafted(drafter, [1], WORDS[:5], "ada")
    assert draft.tokens[0] == WORDS[5]


def test_a_longer_match_a_place_that_others_confirm_and_a_greedy_choice_are_surer() -> None:
    drafter = TextDrafter()
    short, long = drafted(drafter, WORDS, WORDS[10:13]), drafted(drafter, WORDS, WORDS[10:30])
    confirmed = drafted(drafter, WORDS + WORDS, WORDS[10:13])
    torn = drafted(drafter, [*WORDS[:13], 1, 2, 3, *WORDS], WORDS[10:13])
    assert long.confidences[0] > short.confidences[0] == confirmed.confidences[0] > torn.confidences[0]
    warm = drafter.draft(SequenceText(TextIndex()), WORDS, WORDS + WORDS[10:13], None, temperature=1.0, most=1)
    assert warm.confidences[0] < short.confidences[0]


def test_a_long_prompt_is_indexed_in_bounded_parts_while_the_sequence_goes_on() -> None:
    drafter, text = TextDrafter(), SequenceText(TextIndex())
    prompt = [number * 7919 % 50_021 for number in range(3 * PROMPT_TOKENS_PER_STEP)]
    tokens = [*prompt, *prompt[-9:-4]]
    for step in range(1, 4):
        drafter.draft(text, prompt, tokens, None, 0.0, DRAFTS_MOST)
        assert len(text.prompt.tokens) == step * PROMPT_TOKENS_PER_STEP
    draft = drafter.draft(text, prompt, tokens, None, 0.0, 4)
    assert draft.tokens == prompt[-4:]


def test_what_sequences_add_later_is_indexed_once() -> None:
    drafter, text = TextDrafter(), SequenceText(TextIndex())
    prompt = list(range(50))
    for end in range(1, 30):
        drafter.draft(text, prompt, [*prompt, *WORDS[:end]], None, 0.0, 1)
    assert list(text.answer.tokens) == [*prompt[-32:], *WORDS[:29]]


def mislead(drafter: TextDrafter, price: PositionPrice) -> int:
    """Verify wrong drafts until none is worth its price, and return their number."""
    for number in range(10_000):
        draft = drafted(drafter, WORDS, WORDS[10:13])
        assert draft
        if not draft.worth(price)[0]:
            return number
        drafter.verified(draft.first(1), 0, 1)
    raise AssertionError("wrong drafts go on")


def refusals(drafter: TextDrafter, price: PositionPrice) -> int:
    """Refuse drafts until one is worth its price again, and return their number."""
    for number in range(LONGEST_REST + 1):
        draft = drafted(drafter, WORDS, WORDS[10:13]) if number % 512 in (0, 1) else None
        if draft and draft.worth(price)[0]:
            return number
        drafter.refused()
    raise AssertionError("no draft is tried again")


def test_drafts_that_are_never_right_end_by_their_price_and_are_tried_again_ever_later() -> None:
    drafter = TextDrafter()
    rests = []
    for _ in range(3):
        assert mislead(drafter, PRICE) < TRIAL_DRAFTS
        rests.append(refusals(drafter, PRICE))
    assert rests == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST]


def test_drafts_that_are_right_again_pass_the_trial() -> None:
    drafter = TextDrafter()
    for _ in range(2):
        mislead(drafter, PRICE)
        refusals(drafter, PRICE)
    for _ in range(2 * TRIAL_DRAFTS):
        draft = drafted(drafter, WORDS, WORDS[10:13])
        assert draft and draft.worth(PRICE)[0]
        drafter.verified(draft.first(1), 1, 1)
    mislead(drafter, PRICE)
    assert refusals(drafter, PRICE) == FIRST_REST
