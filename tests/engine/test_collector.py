"""Chunks that wait until their sequence is joined."""

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.chunk import Chunk, Finished
from mars_ray.engine.process.collector import ChunkCollector


def finished(tokens: int) -> Finished:
    return Finished(reason="stop", prompt_tokens=1, cached_tokens=0, tokens=tokens, forwards=1, queued_s=0.0)


def chunk(request: str, index: int, token: int, last: bool) -> Chunk:
    return Chunk(
        request_id=request,
        index=index,
        tokens=(token,) * (token % 3),
        pieces=(f"<{token}>",) * (token % 3),
        threshold=1 / (1 + token),
        accepted=((1 / (1 + token % 2), token),) if token else (),
        masks=token,
        finished=finished(token) if last else None,
    )


steps = st.lists(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(0, 9)), max_size=4), max_size=8
)


@given(steps)
def test_a_joined_chunk_says_what_the_chunks_of_the_steps_said_and_others_pass(
    given: list[list[tuple[str, int, int]]],
) -> None:
    collector = ChunkCollector()
    collector.collect("a")
    said: dict[tuple[str, int], list[Chunk]] = {}
    left: list[Chunk] = []
    for step in given:
        chunks = [chunk(request, index, token, last=False) for request, index, token in step]
        for each in chunks:
            said.setdefault((each.request_id, each.index), []).append(each)
        left += collector.add(chunks)
    assert left == [chunk(*place, last=False) for step in given for place in step if place[0] == "b"]
    for index in (0, 1):
        parts = [*said.get(("a", index), []), chunk("a", index, 5, last=True)]
        [joined] = collector.add([parts[-1]])
        assert joined.tokens == tuple(token for each in parts for token in each.tokens)
        assert joined.text == "".join(each.text for each in parts)
        assert joined.threshold == min(each.threshold for each in parts)
        assert dict(joined.accepted) == {
            threshold: count
            for threshold in (1.0, 0.5)
            if (count := sum(dict(each.accepted).get(threshold, 0) for each in parts))
        }
        assert joined.finished == finished(5)
        assert joined.accepted_lengths == tuple(len(each.tokens) for each in parts if each.tokens)


def test_what_was_kept_of_a_forgotten_request_is_dropped() -> None:
    collector = ChunkCollector()
    collector.collect("a")
    assert collector.add([chunk("a", 0, 1, last=False)]) == []
    collector.forget("a")
    assert collector.add([chunk("a", 0, 2, last=True)]) == [chunk("a", 0, 2, last=True)]
    collector.collect("a")
    assert collector.add([chunk("a", 0, 3, last=True)]) == [chunk("a", 0, 3, last=True)]
