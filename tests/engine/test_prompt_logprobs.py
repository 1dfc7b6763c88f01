"""Prompts are scored as one forward of the network over each of them scores them, whatever else the engine does."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.engine.scheduling import scheduler
from mars_ray.errors import RequestError
from mars_ray.model.checkpoint import Checkpoint
from tests.factories.engine import MakeEngine, Output, Prompts, engine_of, request, run

LIKELIEST = 2


@torch.inference_mode()
def scores(oracle: Checkpoint, prompt: tuple[int, ...]) -> list[float]:
    """The log-probability of each token from the second on, by a plain forward."""
    logits_SV = oracle.network(torch.tensor([prompt])).logits[0, :-1].float()
    logits_SV[:, oracle.mask_id] = -torch.inf
    return logits_SV.log_softmax(dim=-1).gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1).tolist()


def said(output: Output) -> list[float]:
    """The scores of a prompt, which come with the first chunk."""
    first, *later = output.chunks
    assert not any(chunk.prompt_logprobs for chunk in later)
    assert all(
        len(entry.top) == LIKELIEST and (entry.start, entry.forward) == (None, 0) for entry in first.prompt_logprobs
    )
    return [entry.chosen for entry in first.prompt_logprobs]


@given(data=st.data())
def test_a_prompt_has_the_scores_of_a_plain_forward_in_any_company(
    bundled: Checkpoint, oracle: Checkpoint, prompts: Prompts, data: st.DataObject
) -> None:
    base = prompts[data.draw(st.integers(0, 20))] + prompts[data.draw(st.integers(100, 120))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "MAX_SCORED_TOKENS", data.draw(st.sampled_from([1, 7, 40, 256])))
        engine = engine_of(
            bundled,
            threshold=0.9,
            max_num_seqs=3,
            max_prefill_tokens=data.draw(st.sampled_from([5, 33, 512])),
            max_kv_tokens=data.draw(st.sampled_from([4096, 400])),
        )
        requests = [
            request(
                number,
                base[: data.draw(st.integers(1, len(base)))],
                DecodeParams(mode=data.draw(st.sampled_from(Mode))),
                max_tokens=data.draw(st.integers(0 if scored else 1, 30)),
                prompt_logprobs=LIKELIEST if scored else None,
            )
            for number, scored in enumerate(data.draw(st.lists(st.booleans(), min_size=1, max_size=6)))
        ]
        outputs = run(engine, requests)
    for each in requests:
        if each.sampling.prompt_logprobs is not None:
            assert said(outputs[each.id]) == pytest.approx(scores(oracle, each.prompt), abs=2e-3)
        assert outputs[each.id].finished.reason in ("stop", "length")


def test_scoring_changes_no_answer(make_engine: MakeEngine, prompts: Prompts) -> None:
    for mode in Mode:
        plain, scored = (
            run(make_engine(), [request(0, prompts[50], DecodeParams(mode=mode), prompt_logprobs=count)])["0"].tokens
            for count in (None, 0)
        )
        assert plain == scored


def test_a_prompt_in_the_cache_is_scored_again_and_then_reused(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine()
    asked = [request(number, prompts[60], max_tokens=4, prompt_logprobs=LIKELIEST) for number in range(2)]
    first, second = (run(engine, [each])[each.id] for each in asked)
    assert said(first) == pytest.approx(said(second), abs=1e-4)
    assert second.finished.cached_tokens == 0
    assert run(engine, [request(2, prompts[60], max_tokens=4)])["2"].finished.cached_tokens > 0


def test_one_of_n_sequences_brings_the_scores(make_engine: MakeEngine, prompts: Prompts) -> None:
    outputs = run(make_engine(), [request(0, prompts[70], n=3, temperature=1.0, prompt_logprobs=LIKELIEST)])
    assert [len(said(outputs[f"0/{index}"])) for index in range(3)] == [len(prompts[70]) - 1, 0, 0]


def test_a_prompt_may_be_scored_without_an_answer(make_engine: MakeEngine, prompts: Prompts) -> None:
    output = run(make_engine(), [request(0, prompts[80], max_tokens=0, prompt_logprobs=LIKELIEST)])["0"]
    assert (output.tokens, output.text, output.finished.reason, output.finished.forwards) == ([], "", "length", 0)
    assert len(said(output)) == len(prompts[80]) - 1


def test_a_prompt_as_long_as_the_context_may_be_scored_without_an_answer(
    bundled: Checkpoint, oracle: Checkpoint, prompts: Prompts
) -> None:
    engine = engine_of(bundled, max_kv_tokens=301)
    longest = tuple(token for prompt in prompts for token in prompt)[: engine.limits.max_model_len]
    assert len(longest) == 301
    output = run(engine, [request(0, longest, max_tokens=0, prompt_logprobs=LIKELIEST)])["0"]
    assert (output.tokens, output.finished.reason) == ([], "length")
    assert said(output) == pytest.approx(scores(oracle, longest), abs=2e-3)


def test_the_likeliest_tokens_are_listed_best_first(make_engine: MakeEngine, prompts: Prompts) -> None:
    [chunk] = run(make_engine(), [request(0, prompts[90], max_tokens=0, prompt_logprobs=5)])["0"].chunks
    for entry in chunk.prompt_logprobs:
        assert all(better >= worse for (_, better), (_, worse) in pairwise(entry.top))
        assert entry.chosen <= entry.top[0][1] + 1e-6


def test_no_answer_without_scores_is_refused() -> None:
    with pytest.raises(RequestError, match="max_tokens is 0; it must be a whole number, at least 1"):
        SamplingParams(max_tokens=0)
    with pytest.raises(RequestError, match="prompt_logprobs is 21"):
        SamplingParams(prompt_logprobs=21)
