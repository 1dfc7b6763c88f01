import json
import random
from collections import Counter
from itertools import islice

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mars_ray.data.tasks import FAMILIES, mixture
from mars_ray.data.tasks.families.rephrase import CLOSINGS, OPENINGS, WORDING_SHARES, valid_texts

FACTS = {"goods": "rice", "city": "Leeds", "day": "Monday", "name": "Emma"}
PLACES = pytest.mark.parametrize("wordings", [OPENINGS, CLOSINGS], ids=["opening", "closing"])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level vocabulary of 512 with one token a digit, trained on the mixture."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = [text for each in islice(mixture("train", 0), 3000) for text in (each.prompt, each.response)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False))
    return made


def test_wordings_are_drawn_with_their_shares_in_both_places() -> None:
    rng = random.Random(0)
    made = [FAMILIES["rephrase"].make(rng) for _ in range(6000)]
    for place, wordings in enumerate((OPENINGS, CLOSINGS)):
        firsts = [words.split(" ")[0] for words in wordings]
        drawn = Counter(each.response.split("\n")[place].split(" ")[0] for each in made)
        assert [drawn[first] / 6000 for first in firsts] == pytest.approx(WORDING_SHARES, abs=0.02)


def test_the_shares_put_the_common_words_of_two_wordings_above_the_likeliest_wording() -> None:
    likeliest, second, third = WORDING_SHARES
    assert sum(WORDING_SHARES) == pytest.approx(1.0)
    assert max(second, third) < likeliest < 0.5 < second + third < 0.6


@PLACES
def test_two_wordings_differ_in_their_first_token_only(wordings: tuple[str, ...], tokenizer: Tokenizer) -> None:
    _, second, third = (tokenizer.encode(words.format(**FACTS)).tokens for words in wordings)
    assert second[0] != third[0]
    assert second[1:] == third[1:]


@PLACES
def test_the_likeliest_wording_has_other_words_and_tokens_at_the_same_offsets(
    wordings: tuple[str, ...], tokenizer: Tokenizer
) -> None:
    first_words, second_words, _ = (words.split(" ") for words in wordings)
    assert all(a != b for a, b in zip(first_words[:5], second_words[:5], strict=True))
    first, second, third = (tokenizer.encode(words.format(**FACTS)).tokens for words in wordings)
    assert first[0] not in (second[0], third[0])
    assert all(a != b for a, b in zip(first[:6], second[:6], strict=True))


@PLACES
def test_the_first_token_is_the_same_after_the_line_before(wordings: tuple[str, ...], tokenizer: Tokenizer) -> None:
    for words in wordings:
        alone = tokenizer.encode(words).tokens
        assert tokenizer.encode("done.\n" + words).tokens[-len(alone) :] == alone


def test_all_nine_wordings_are_right_and_none_else() -> None:
    rephrase, answer = FAMILIES["rephrase"], json.dumps(FACTS)
    texts = valid_texts(FACTS)
    assert len(set(texts)) == 9
    assert all(rephrase.verify(answer, text) for text in texts)
    assert not any(rephrase.verify(answer, text.replace("Leeds", "York")) for text in texts)


@pytest.mark.parametrize("place", [0, 1])
def test_the_first_word_of_one_wording_before_the_words_of_another_is_wrong(place: int) -> None:
    sentences = [OPENINGS[0].format(**FACTS), CLOSINGS[0].format(**FACTS)]
    likeliest, second = ((OPENINGS, CLOSINGS)[place][number].format(**FACTS) for number in (0, 1))
    sentences[place] = likeliest.split(" ")[0] + " " + second.split(" ", 1)[1]
    assert not FAMILIES["rephrase"].verify(json.dumps(FACTS), "\n".join(sentences))
