"""The events of a stream are the same ones wherever the network cut it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.load import reply
from mars_ray.load.reply import SseParser

LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=6)
LINES = st.lists(LINE, min_size=1, max_size=3)
NOISE = st.sampled_from(["", ": hello", ":", "id: 7", "event: message", "retry: 10", "nonsense", "datum: x"])
END = st.sampled_from(["\n", "\r", "\r\n"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """Bytes, and the events in them."""
    events = draw(st.lists(LINES, max_size=5))
    written = draw(st.sampled_from(["", "\ufeff"]))
    for lines in events:
        if noise := draw(NOISE):
            written += noise + draw(END)
        written += "".join(f"data: {line}{draw(END)}" for line in lines)
        # A lone CR before a lone LF would be one line end and no blank line.
        written += "\r\n" if written.endswith("\r\n") else written[-1]
    return written.encode(), ["\n".join(lines) for lines in events]


def parsed(stream: bytes, cuts: list[int]) -> list[str]:
    parser = SseParser()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    return [each for a, b in pairwise(edges) for each in parser.feed(stream[a:b])]


@given(stream=streams(), cuts=st.lists(st.integers(0, 200), max_size=12))
def test_any_cut_of_the_bytes_gives_the_events_that_were_written(
    stream: tuple[bytes, list[str]], cuts: list[int]
) -> None:
    written, events = stream
    assert parsed(written, cuts) == parsed(written, []) == parsed(written, list(range(len(written)))) == events


@given(garbage=st.binary(max_size=60).filter(lambda each: b"data" not in each), cuts=st.lists(st.integers(0, 60)))
def test_bytes_without_data_hold_no_event(garbage: bytes, cuts: list[int]) -> None:
    assert parsed(garbage, cuts) == []


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", ["a"]),
        (b"data:a\n\n", ["a"]),
        (b"data:  a\n\n", [" a"]),
        (b"data\n\n", [""]),
        (b"data: a\ndata: b\n\n", ["a\nb"]),
        (b"event: error\ndata: a\n\n", ["a"]),
        (b"\n\n\ndata: a\n\n\n\n", ["a"]),
        (b"data: never ended\n", []),
        (b": data: a comment\n\n", []),
    ],
)
def test_lines_are_read_as_the_standard_says(stream: bytes, events: list[str]) -> None:
    assert parsed(stream, []) == events


@pytest.mark.parametrize("stream", [b"data: " + b"x" * 50, b"data: xxxxxxxx\n" * 5, b"x" * 50])
def test_an_event_without_end_is_refused_and_not_kept(stream: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "EVENT_BYTES_MAX", 40)
    with pytest.raises(ValueError, match="an event has more than"):
        parsed(stream, [])
