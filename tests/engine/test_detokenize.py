"""Streamed text against decoding everything at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import TokenizersBackend

from mars_ray.engine.scheduling.detokenizer import IncrementalDetokenizer
from tests.engine.engine_parts import bundled_tokenizer

TOKENIZER = bundled_tokenizer()
BYTE_IDS = [token for token in range(1024) if TOKENIZER.decode([token]) == "\ufffd"]
TEXTS = ["é", "😀", "漢字", "a\ufffdb", " sentence", "\n\n", "1, 2", "👩\u200d👩", " Tokyo"]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def decoded(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


WORDS = st.one_of(
    st.integers(0, 1023).map(lambda token: [token]),
    st.sampled_from(BYTE_IDS).map(lambda token: [token]),
    st.sampled_from([ids(text) for text in TEXTS]),
    st.sampled_from([ids(text)[:-1] for text in TEXTS]),
    st.text(max_size=3).map(ids),
)
TOKENS = st.lists(WORDS, max_size=10).map(lambda words: [token for word in words for token in word])


def settled(tokens: list[int]) -> str:
    """The text of the longest beginning that does not end in half a character."""
    return next(text for end in range(len(tokens), -1, -1) if not (text := decoded(tokens[:end])).endswith("\ufffd"))


def streamed(tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """The pieces up to the stop string or the end, and whether a stop string ended them."""
    stream, pieces = IncrementalDetokenizer(TOKENIZER, stop), []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces, True
    return [*pieces, stream.finish()], False


@given(TOKENS)
def test_the_pieces_joined_are_what_the_tokenizer_decodes(tokens: list[int]) -> None:
    pieces, stopped = streamed(tokens)
    assert not stopped
    assert "".join(pieces) == decoded(tokens)


@given(TOKENS)
def test_no_piece_before_the_last_holds_half_a_character(tokens: list[int]) -> None:
    pieces, _ = streamed(tokens)
    so_far = ["".join(pieces[:count]) for count in range(len(tokens) + 1)]
    assert so_far == [settled(tokens[:count]) for count in range(len(tokens) + 1)]


@st.composite
def tokens_and_stops(draw: st.DrawFn) -> tuple[list[int], tuple[str, ...]]:
    """Tokens, and stop strings most of which are somewhere in their text."""
    tokens = draw(TOKENS)
    text = decoded(tokens).replace("\ufffd", "") or "none"
    stops = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + draw(st.integers(1, 5))] + draw(st.sampled_from(["", "", "", "x"])))
    return tokens, tuple(stops)


def cut_by_hand(tokens: list[int], stops: tuple[str, ...]) -> tuple[str, int, bool]:
    """The text, the tokens it took and whether it was stopped, decoding ever longer beginnings."""
    for count in range(len(tokens) + 1):
        text = settled(tokens[:count])
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            return text[: min(places)], count, True
    return decoded(tokens), len(tokens), False


@given(tokens_and_stops())
@settings(max_examples=300)
def test_the_text_ends_before_the_stop_string_that_is_first_complete(given: tuple[list[int], tuple[str, ...]]) -> None:
    tokens, stops = given
    pieces, stopped = streamed(tokens, stops)
    text, count, cut = cut_by_hand(tokens, stops)
    assert ("".join(pieces), stopped) == (text, cut)
    assert not stopped or len(pieces) == count


@given(tokens_and_stops())
def test_nothing_that_left_is_part_of_a_stop_string(given: tuple[list[int], tuple[str, ...]]) -> None:
    tokens, stops = given
    pieces, _ = streamed(tokens, stops)
    assert not any(stop in "".join(pieces) for stop in stops)


@given(tokens_and_stops())
def test_where_nothing_may_stop_the_whole_text_leaves(given: tuple[list[int], tuple[str, ...]]) -> None:
    tokens, stops = given
    stream = IncrementalDetokenizer(TOKENIZER, stops)
    pieces = [stream.push(token, may_stop=False) for token in tokens]
    assert "".join(pieces) + stream.finish() == decoded(tokens)
    assert not stream.stopped


def test_a_stop_string_inside_one_token_ends_the_text_in_the_middle_of_it() -> None:
    (token,) = ids(" sentence")
    assert streamed([token], ("ten",)) == ([" sen"], True)


def test_a_stop_string_across_tokens_holds_its_beginning_back() -> None:
    tokens = ids("abc;\n;")
    pieces, stopped = streamed(tokens, (";\n;",))
    assert stopped and len(pieces) == len(tokens)
    assert "".join(pieces) == "abc"


def test_a_stop_string_across_the_bytes_of_a_character_is_complete_with_the_last_byte() -> None:
    tokens = ids("a😀b")
    assert len(tokens) == 6, "the emoji is four tokens"
    assert streamed(tokens, ("😀",)) == (["a", "", "", "", ""], True)
    assert streamed(tokens, ("a😀b",)) == ([""] * 6, True)


def test_what_was_held_back_leaves_at_the_end_when_it_did_not_become_a_stop_string() -> None:
    assert streamed(ids("a") + ids("b"), ("bcd",)) == (["a", "", "b"], False)


def test_of_two_stop_strings_in_one_token_the_first_in_the_text_counts() -> None:
    (token,) = ids(" sentence")
    assert streamed([token], ("nce", "ent")) == ([" s"], True)


def test_a_stop_string_seen_too_early_does_not_stop_later() -> None:
    stream = IncrementalDetokenizer(TOKENIZER, ("ab",))
    pieces = [stream.push(token, may_stop=number >= 2) for number, token in enumerate(ids("abcab"))]
    assert stream.stopped
    assert "".join(pieces) == "abc"


def test_special_tokens_have_no_text_and_no_part_in_a_stop_string() -> None:
    tokens = [*ids("a"), *TOKENIZER.convert_tokens_to_ids(["<|end|>", "<|mask|>"]), *ids("b")]
    assert streamed(tokens, ("ab",))[1]
    assert "".join(streamed(tokens)[0]) == "ab"


def tokenizer_with_half_characters() -> TokenizersBackend:
    """As those of GPT and Qwen have them: one token is a full stop and the first byte of a character."""
    model = models.BPE(vocab={"a": 0, ".": 1, "â": 2, ".â": 3}, merges=[(".", "â")])
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizersBackend(tokenizer_object=tokenizer)


@pytest.mark.parametrize("stop", [".", "a."])
def test_a_stop_string_before_half_a_character_ends_the_text_even_if_no_token_follows(stop: str) -> None:
    stream = IncrementalDetokenizer(tokenizer_with_half_characters(), (stop,))
    text = stream.push(0) + stream.push(3) + stream.finish()
    assert stop not in text


def test_bytes_that_change_earlier_characters_end_no_answer() -> None:
    vocabulary = {"a": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "<0xF0>": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    stream = IncrementalDetokenizer(TokenizersBackend(tokenizer_object=tokenizer), ("b",))
    pieces = [stream.push(token) for token in (0, 1, 2, 3, 4, 0)]
    assert "".join([*pieces, stream.finish()]) == "a€a"
