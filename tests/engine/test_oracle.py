"""The engine says what the reference decoder says, whatever happens around a sequence."""

import random
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from mars_ray.engine.kv import slot_allocator
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import LOSSLESS, DecodeParams
from mars_ray.errors import ModelError
from mars_ray.method.metric import Metric
from mars_ray.method.reference import DecodedSequence, DecodeOptions, decode, forward, last_logits
from mars_ray.model.checkpoint import Checkpoint
from tests.factories.cards import model_card
from tests.factories.engine import MakeEngine, Output, as_unknown, bundled_checkpoint, collect, engine_of, request, run
from tests.factories.networks import tiny_network
from tests.factories.tokenizers import tiny_tokenizer

THRESHOLDS = {
    Metric.PROBABILITY: (1.0, 0.99, 0.95, 0.9, 0.7, 0.5, 0.0),
    Metric.MARGIN: (1.0, 0.99, 0.95, 0.9, 0.7, 0.5, 0.0),
    Metric.ENTROPY: (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 8.0),
}


@st.composite
def decodings(draw: st.DrawFn) -> DecodeParams:
    metric = draw(st.sampled_from(Metric))
    return DecodeParams(
        mode=draw(st.sampled_from(Mode)),
        threshold=draw(st.sampled_from(THRESHOLDS[metric])),
        metric=metric,
        block=draw(st.integers(1, 8)),
    )


def oracle_options(decoding: DecodeParams, stop_ids: frozenset[int], max_tokens: int) -> DecodeOptions:
    acceptance = decoding.acceptance(0.95) or LOSSLESS
    return DecodeOptions(
        mode="ar" if decoding.mode is Mode.AR else "threshold",
        threshold=acceptance.threshold,
        metric=acceptance.metric,
        block=decoding.block or 8,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
    )


NETWORK: dict[str, Any] = {
    "head_dim": 32,
    "intermediate_size": 64,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
}
"""A network that the kernels support, with clear choices and soft caps."""
DIFFERENT: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 7},
    "phi3": {"sliding_window": 7},
    "gemma2": {"sliding_window": 7, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
}


class Oracle:
    """The reference decoder, each answer computed once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.decode = cache(self._decode)

    def _decode(self, prompt: tuple[int, ...], decoding: DecodeParams, max_tokens: int) -> DecodedSequence:
        options = oracle_options(decoding, self._checkpoint.stop_ids, max_tokens)
        return decode(self._checkpoint.network, [prompt], options, mask_id=self._checkpoint.mask_id)[0]


@pytest.fixture(scope="session")
def reference(oracle: Checkpoint) -> Oracle:
    return Oracle(oracle)


def assert_as_the_oracle_says(output: Output, expected: DecodedSequence, decoding: DecodeParams) -> None:
    assert output.tokens == expected.tokens
    assert output.finished.reason == expected.finish_reason
    if decoding.acceptance(0.95) != LOSSLESS:  # in exact mode the number of drafts follows the load
        assert output.finished.forwards == expected.forwards


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 503), decodings(), st.integers(1, 16), st.integers(0, 12)), min_size=1, max_size=7
    ),
    max_num_seqs=st.integers(1, 5),
    max_kv_tokens=st.sampled_from((128, 200, 320, 4096)),
    max_prefill_tokens=st.sampled_from((5, 17, 64, 512)),
    cancelled=st.sets(st.tuples(st.integers(0, 8), st.integers(0, 20)), max_size=2),
)
def test_every_sequence_equals_the_oracles_whatever_its_neighbours(
    arrivals: list[tuple[int, DecodeParams, int, int]],
    max_num_seqs: int,
    max_kv_tokens: int,
    max_prefill_tokens: int,
    cancelled: set[tuple[int, int]],
    make_engine: MakeEngine,
    prompts: list[tuple[int, ...]],
    reference: Oracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_allocator, "FIRST_WIDTH", 32)  # or nothing here would ever outgrow a slot
    engine = make_engine(max_num_seqs=max_num_seqs, max_kv_tokens=max_kv_tokens, max_prefill_tokens=max_prefill_tokens)
    outputs: dict[tuple[str, int], Output] = {}
    step = 0
    while engine.busy or step <= 12:
        for number, (which, decoding, max_tokens, arrival) in enumerate(arrivals):
            if arrival == step:
                engine.add(request(number, prompts[which], decoding, max_tokens=max_tokens))
        for number, when in cancelled:
            if when == step:
                engine.cancel(str(number))
        collect(outputs, engine.step())
        step += 1
    for number, (which, decoding, max_tokens, _) in enumerate(arrivals):
        output = outputs[str(number), 0]
        expected = reference.decode(prompts[which], decoding, max_tokens)
        if output.finished.reason == "cancelled":
            assert output.tokens == expected.tokens[: len(output.tokens)]
        else:
            assert_as_the_oracle_says(output, expected, decoding)
    assert engine.running == engine.waiting == 0


def test_preemption_happens_and_changes_nothing(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], reference: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_allocator, "FIRST_WIDTH", 32)
    engine = make_engine(max_num_seqs=4, max_kv_tokens=160)
    decoding = DecodeParams(threshold=0.9, block=4)
    outputs = run(engine, [request(n, prompts[n * 40], decoding, max_tokens=40) for n in range(12)])
    assert engine.state().preemptions > 0
    for number in range(12):
        expected = reference.decode(prompts[number * 40], decoding, 40)
        assert_as_the_oracle_says(outputs[str(number)], expected, decoding)


def test_a_prefix_left_by_another_sequence_is_used_and_changes_nothing(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], reference: Oracle
) -> None:
    engine = make_engine(max_num_seqs=2)
    decoding = DecodeParams(threshold=0.95, block=8)
    prompt = prompts[100]
    run(engine, [request("first", prompt, decoding, max_tokens=32)])
    again = run(engine, [request("second", prompt, decoding, max_tokens=32)])["second"]
    assert again.finished.cached_tokens == len(prompt) - 1
    assert_as_the_oracle_says(again, reference.decode(prompt, decoding, 32), decoding)


def test_a_burst_with_one_long_prefix_computes_it_once(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    shared = tuple(token for prompt in prompts[:5] for token in prompt)
    outputs = run(make_engine(), [request(n, (*shared, n + 20), max_tokens=4) for n in range(6)])
    cached = [outputs[str(n)].finished.cached_tokens for n in range(6)]
    assert cached == [0] + [len(shared)] * 5


def test_the_n_sequences_of_a_request_share_its_prompt(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    prompt = max(prompts, key=len)
    outputs = run(make_engine(), [request("a", prompt, n=4, temperature=1.0, max_tokens=16)])
    assert sorted(outputs) == ["a/0", "a/1", "a/2", "a/3"]
    assert [outputs[f"a/{n}"].finished.cached_tokens for n in range(4)] == [0] + [len(prompt) - 1] * 3


def test_threshold_one_equals_generate_of_transformers(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], oracle: Checkpoint
) -> None:
    chosen = prompts[::14]
    outputs = run(
        make_engine(), [request(n, p, DecodeParams(threshold=1.0), max_tokens=48) for n, p in enumerate(chosen)]
    )
    for number, prompt in enumerate(chosen):
        given = torch.tensor([prompt])
        ids = oracle.network.generate(given, max_new_tokens=48, do_sample=False, attention_mask=torch.ones_like(given))
        assert outputs[str(number)].tokens == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_exact_mode_equals_autoregressive_decoding_on_prompts_of_all_families(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], every: int
) -> None:
    chosen = prompts[::every]
    plain = run(make_engine(), [request(n, p, DecodeParams(mode=Mode.AR), max_tokens=64) for n, p in enumerate(chosen)])
    ahead = DecodeParams(mode=Mode.EXACT, threshold=0.5, block=8)
    exact = run(make_engine(), [request(n, p, ahead, max_tokens=64) for n, p in enumerate(chosen)])
    assert [exact[name].tokens for name in plain] == [plain[name].tokens for name in plain]
    assert [exact[name].text for name in plain] == [plain[name].text for name in plain]
    assert sum(each.finished.forwards for each in exact.values()) < 0.5 * sum(
        len(each.tokens) for each in plain.values()
    )


def replay(checkpoint: Checkpoint, prompt: tuple[int, ...], output: Output) -> list[tuple[int, ...]]:
    """Decode with the reference decoder, each forward with the threshold of the engine's own."""
    sequence, tokens = DecodedSequence(), list[tuple[int, ...]]()
    for chunk in output.chunks:
        before = len(sequence.tokens)
        options = DecodeOptions(threshold=chunk.threshold, block=8, max_tokens=40, stop_ids=checkpoint.stop_ids)
        forward(checkpoint.network, prompt, sequence, options, mask_id=checkpoint.mask_id)
        tokens.append(tuple(sequence.tokens[before:]))
    return tokens


def can_follow(checkpoint: Checkpoint, prefix: list[int], tokens: tuple[int, ...], threshold: float) -> bool:
    """Return whether a forward can give `tokens`: some are the autoregressive choice, and masks after them are sure."""
    mask_id = checkpoint.mask_id
    choices = last_logits(checkpoint.network, [*prefix, *tokens[:-1]], len(tokens), mask_id).argmax(dim=-1).tolist()
    for verified in range(len(tokens), 0, -1):
        if choices[:verified] != list(tokens[:verified]):
            continue
        masks = len(tokens) - verified
        if not masks:
            return True
        ids = [*prefix, *tokens[:verified], *[mask_id] * masks]
        sure, best = last_logits(checkpoint.network, ids, masks, mask_id).softmax(dim=-1).max(dim=-1)
        if best.tolist() == list(tokens[verified:]) and bool((sure >= threshold - 1e-4).all()):
            return True
    return False


@torch.inference_mode()
def test_a_threshold_that_changes_between_steps_counts_from_the_next_forward(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], oracle: Checkpoint
) -> None:
    engine, draws = make_engine(max_num_seqs=3), random.Random(5)

    def change(_: int) -> None:
        engine.set_thresholds({"standard": draws.choice((0.999, 0.99, 0.9, 0.5, 0.0))})

    chosen = prompts[::70]
    outputs = run(engine, [request(n, p, DecodeParams(block=8), max_tokens=40) for n, p in enumerate(chosen)], change)
    assert len({chunk.threshold for each in outputs.values() for chunk in each.chunks}) == 5
    for number, prompt in enumerate(chosen):
        output = outputs[str(number)]
        assert [chunk.tokens for chunk in output.chunks] == replay(oracle, prompt, output)


@torch.inference_mode()
def test_a_threshold_that_goes_to_one_and_back_gives_tokens_of_one_at_a_time_while_it_is_one(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], oracle: Checkpoint
) -> None:
    engine, draws, lossless = make_engine(max_num_seqs=3), random.Random(7), 0

    def change(_: int) -> None:
        engine.set_thresholds({"standard": draws.choice((1.0, 1.0, 0.3))})

    chosen = prompts[::30]
    outputs = run(engine, [request(n, p, DecodeParams(block=8), max_tokens=40) for n, p in enumerate(chosen)], change)
    for number, prompt in enumerate(chosen):
        output, place = outputs[str(number)], len(prompt) - 1
        logits_SV = oracle.network(torch.tensor([[*prompt, *output.tokens]])).logits[0]
        logits_SV[:, oracle.mask_id] = -torch.inf
        best = logits_SV.argmax(dim=-1).tolist()
        for chunk in output.chunks:
            if chunk.threshold == 1:
                assert list(chunk.tokens) == best[place : place + len(chunk.tokens)]
                lossless += len(chunk.tokens) > 1
            place += len(chunk.tokens)
    assert lossless, "several at a time"


@torch.inference_mode()
def test_a_block_that_adapts_changes_how_far_is_looked_and_nothing_else(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], oracle: Checkpoint
) -> None:
    engine = make_engine(max_num_seqs=8)
    outputs = run(engine, [request(n, p, max_tokens=40) for n, p in enumerate(prompts[::5])])
    for number in range(0, len(outputs), 9):
        output = outputs[str(number)]
        prefix = list(prompts[number * 5])
        for chunk in output.chunks:
            assert can_follow(oracle, prefix, chunk.tokens, chunk.threshold)
            prefix += chunk.tokens


def test_modes_mix_in_one_batch(make_engine: MakeEngine, prompts: list[tuple[int, ...]], reference: Oracle) -> None:
    decodings_ = [DecodeParams(mode=mode, threshold=0.8, block=6) for mode in Mode] * 4
    outputs = run(
        make_engine(), [request(n, prompts[n * 33], each, max_tokens=24) for n, each in enumerate(decodings_)]
    )
    for number, decoding in enumerate(decodings_):
        assert_as_the_oracle_says(outputs[str(number)], reference.decode(prompts[number * 33], decoding, 24), decoding)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    "architecture", ["qwen2", "qwen3", "llama", "mistral", "phi3", "gemma", "gemma2", "gemma3_text", "mixtral"]
)
def test_other_architectures_decode_unchanged(architecture: str, kernels: bool) -> None:
    network: PreTrainedModel = tiny_network(architecture, **NETWORK, **DIFFERENT.get(architecture, {}))
    checkpoint = Checkpoint(deepcopy(network), tiny_tokenizer(), mask_id=310, card=model_card(block=3))
    if not kernels:
        as_unknown(checkpoint)
    given = [tuple(range(5, 5 + length)) for length in (3, 21, 40)]
    outputs = run(
        engine_of(checkpoint),
        [
            request(n, p, DecodeParams(threshold=0.0, block=3), max_tokens=9, ignore_eos=True)
            for n, p in enumerate(given)
        ],
    )
    expected = decode(network, given, DecodeOptions(threshold=0.0, block=3, max_tokens=9), mask_id=310)
    assert [outputs[str(n)].tokens for n in range(3)] == [each.tokens for each in expected]


@pytest.mark.parametrize(
    ("architecture", "named"), [("gpt_oss", "gpt_oss models has sinks"), ("bloom", "bloom models cannot be replaced")]
)
def test_networks_with_attention_of_another_kind_are_refused(architecture: str, named: str) -> None:
    sizes = {"num_local_experts": 2} if architecture == "gpt_oss" else {}
    checkpoint = Checkpoint(tiny_network(architecture, **sizes), tiny_tokenizer(), mask_id=310, card=None)
    with pytest.raises(ModelError, match=named):
        engine_of(checkpoint)


def test_log_probabilities_belong_to_the_tokens_they_come_with(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    # Enough requests for steps that audit what earlier ones looked ahead: their forwards have more logits than tokens.
    sure = DecodeParams(threshold=0.5, block=4)
    outputs = run(
        make_engine(), (request(n, prompt, sure, max_tokens=40, logprobs=1) for n, prompt in enumerate(prompts[::8]))
    )
    for output in outputs.values():
        assert [token for ((token, _),) in (each.top for each in output.logprobs)] == output.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_cuda_the_engine_says_what_generate_says(prompts: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    plain, other = (bundled_checkpoint(dtype=dtype, device="cuda") for _ in range(2))
    engine = engine_of(other)
    chosen = prompts[::8]
    said = run(engine, [request(n, p, DecodeParams(mode=Mode.EXACT), max_tokens=32) for n, p in enumerate(chosen)])
    same = 0
    for number, prompt in enumerate(chosen):
        given = torch.tensor([prompt], device="cuda")
        ids = plain.network.generate(given, max_new_tokens=32, do_sample=False, attention_mask=torch.ones_like(given))
        same += said[str(number)].tokens == ids[0, len(prompt) :].tolist()
    # bfloat16 has 8 bits of mantissa: two kernels may order a near tie differently, in at most one prompt of twenty.
    assert same >= len(chosen) * (1.0 if dtype is torch.float32 else 0.95)
