"""One token at a time with the reader of the baselines, against the reference decoder."""

from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from mars_ray.method.reference import DecodeOptions, decode
from pipelines.reproduction.baselines.autoregressive import decode_autoregressive
from tests.factories.token_rows import MASK_ID

prompt = st.lists(st.integers(0, MASK_ID - 1), min_size=1, max_size=9)


@given(
    prompts=st.lists(prompt, max_size=3),
    max_tokens=st.integers(1, 20),
    stop_ids=st.frozensets(st.integers(0, MASK_ID - 1), max_size=6),
)
def test_a_forward_gives_the_token_that_the_reference_decoder_gives(
    exact_network: PreTrainedModel, prompts: list[list[int]], max_tokens: int, stop_ids: frozenset[int]
) -> None:
    answers = decode_autoregressive(exact_network, prompts, max_tokens=max_tokens, stop_ids=stop_ids, mask_id=MASK_ID)
    options = DecodeOptions(mode="ar", max_tokens=max_tokens, stop_ids=stop_ids)
    expected = decode(exact_network, prompts, options, mask_id=MASK_ID)
    assert [(a.tokens, a.finish_reason) for a in answers] == [(e.tokens, e.finish_reason) for e in expected]
    assert all(answer.forwards == len(answer.tokens) for answer in answers)
