"""The reference decoder against a plainer one, which decodes one token at a time."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from mars_ray.method.logits import logits_at
from mars_ray.method.metric import Metric
from mars_ray.method.reference import DecodedSequence, DecodeOptions, decode
from tests.factories.token_rows import MASK_ID

prompts = st.lists(st.lists(st.integers(0, MASK_ID - 1), min_size=1, max_size=9), min_size=1, max_size=4)
options = st.builds(
    DecodeOptions,
    mode=st.sampled_from(["ar", "threshold"]),
    threshold=st.sampled_from([0.0, 0.1, 0.3, 0.6, 0.95, 1.0]),
    metric=st.sampled_from(Metric),
    block=st.integers(1, 8),
    max_tokens=st.integers(1, 14),
    stop_ids=st.frozensets(st.integers(0, MASK_ID - 1), max_size=12),
)


def last_choices(
    network: PreTrainedModel, ids: list[int], count: int, metric: Metric
) -> list[tuple[int, float, float]]:
    """After each of the last `count` ids: the most likely token, its confidence, and a bound of its probability."""
    logits = network(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    logits[:, MASK_ID] = -torch.inf
    choices = []
    for p in logits.softmax(-1)[len(ids) - count :]:
        first, second = p.topk(2).values.tolist()
        entropy = -sum(float(x * x.log()) for x in p if x > 0)
        value = {"probability": first, "margin": first - second, "entropy": entropy}[metric]
        choices.append((int(p.argmax()), value, math.exp(-entropy) if metric is Metric.ENTROPY else value))
    return choices


def masks_after(right: int, likely: list[float], most: int) -> int:
    """All masks stand after as many right drafts if exactly so many are right in one of twenty cases."""
    exactly = [math.prod(likely[:n]) * (1 - (likely[n] if n < len(likely) else 0)) for n in range(len(likely) + 1)]
    return most if exactly[right] >= 0.05 else 0


def decode_plainly(network: PreTrainedModel, prompt: list[int], options: DecodeOptions) -> DecodedSequence:
    """Decode one sequence one token at a time, with the whole of the network's output."""
    done = DecodedSequence()
    drafts: list[tuple[int, float]] = []
    while True:
        done.forwards += 1
        left = options.max_tokens - len(done.tokens)
        right = 0
        ended = False
        while not ended:
            token, value, _ = last_choices(network, prompt + done.tokens, 1, options.metric)[0]
            done.tokens.append(token)
            done.confidences.append(value)
            ended = token in options.stop_ids or len(done.tokens) == options.max_tokens
            if right == len(drafts) or token != drafts[right][0]:
                break
            right += 1
        if ended:
            done.finish_reason = "stop" if done.tokens[-1] in options.stop_ids else "length"
            return done
        likely = [chance for _, chance in drafts]
        masks = 0 if options.mode == "ar" else min(masks_after(right, likely, options.block - 1), left - 1 - right)
        ids = prompt + done.tokens[:-1] + [MASK_ID] * masks  # the forward that gives the last token looks ahead, too
        drafts, all_right = [], 1.0
        for token, value, chance in last_choices(network, ids, masks, options.metric):
            never = options.threshold == (0 if options.metric is Metric.ENTROPY else 1)
            passes = value <= options.threshold if options.metric is Metric.ENTROPY else value >= options.threshold
            if passes and not never and not drafts:
                done.tokens.append(token)
                done.confidences.append(value)
                if token in options.stop_ids or len(done.tokens) == options.max_tokens:
                    done.finish_reason = "stop" if token in options.stop_ids else "length"
                    return done
                continue
            all_right *= chance
            if all_right < 0.1:
                break
            drafts.append((token, chance))
            if token in options.stop_ids:
                break


@torch.no_grad()
@given(batch=prompts, asked=options)
def test_it_decodes_as_the_plain_decoder_does_whatever_else_is_in_the_batch(
    network: PreTrainedModel, batch: list[list[int]], asked: DecodeOptions
) -> None:
    for prompt, decoded in zip(batch, decode(network, batch, asked, mask_id=MASK_ID), strict=True):
        plain = decode_plainly(network, prompt, asked)
        assert (decoded.tokens, decoded.forwards, decoded.finish_reason) == (
            plain.tokens,
            plain.forwards,
            plain.finish_reason,
        )
        assert decoded.confidences == pytest.approx(plain.confidences, abs=1e-4)


def test_autoregressive_mode_and_threshold_one_give_the_greedy_tokens_of_transformers(network: PreTrainedModel) -> None:
    prompt = [5, 9, 2, 40]
    greedy = network.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0, suppress_tokens=[MASK_ID]
    )[0, 4:].tolist()
    for asked in (DecodeOptions(mode="ar", max_tokens=40), DecodeOptions(threshold=1.0, max_tokens=40)):
        (decoded,) = decode(network, [prompt], asked, mask_id=MASK_ID)
        assert decoded.tokens == greedy
        assert decoded.forwards == 40 if asked.mode == "ar" else decoded.forwards <= 40


def test_a_threshold_of_zero_keeps_every_block_whole(network: PreTrainedModel) -> None:
    (decoded,) = decode(network, [[1, 2, 3]], DecodeOptions(threshold=0.0, block=4, max_tokens=12), mask_id=MASK_ID)
    assert (len(decoded.tokens), decoded.forwards) == (12, 3)


def test_a_stop_token_inside_a_chunk_ends_the_sequence_there(network: PreTrainedModel) -> None:
    whole = DecodeOptions(threshold=0.0, block=8, max_tokens=8)
    (free,) = decode(network, [[1, 2, 3]], whole, mask_id=MASK_ID)
    stop = free.tokens[3]
    stopping = DecodeOptions(threshold=0.0, block=8, max_tokens=8, stop_ids=frozenset({stop}))
    (decoded,) = decode(network, [[1, 2, 3]], stopping, mask_id=MASK_ID)
    assert decoded.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert decoded.finish_reason == "stop"


def test_no_prompts_give_no_results(network: PreTrainedModel) -> None:
    assert decode(network, [], DecodeOptions(), mask_id=MASK_ID) == []


@torch.no_grad()
def test_picked_logits_are_those_of_a_whole_forward_where_an_architecture_caps_them() -> None:
    torch.manual_seed(0)
    size = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "final_logit_softcapping": 0.5}
    network = Gemma2ForCausalLM(Gemma2Config(**size, **heads, attn_implementation="eager")).eval()
    ids = torch.randint(50, (2, 7))
    where = torch.rand(2, 7) > 0.5
    whole = network(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits_at(network, where, input_ids=ids), whole[where])
