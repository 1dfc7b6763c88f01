"""Chunks of several tokens from one step: stops, limits, logprobs, penalties, seeds and failures."""

from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency

from mars_ray.engine.core import engine as engine_module
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.engine.stats.grid import GRID
from mars_ray.errors import ConfigError, PromptTooLongError, QueueFullError, RequestError, StepError
from mars_ray.model.checkpoint import Checkpoint
from tests.factories.engine import MakeEngine, Output, request, run

EVERYTHING = DecodeParams(threshold=0.0, block=8)
"""Accepts all masks: the largest chunks there are."""
MODES = [
    DecodeParams(mode=Mode.AR),
    DecodeParams(threshold=0.9, block=8),
    EVERYTHING,
    DecodeParams(mode=Mode.EXACT, block=8),
]


def alone(engine: Engine, prompt: tuple[int, ...], decode: DecodeParams = EVERYTHING, **sampling: Any) -> Output:
    return run(engine, [request("it", prompt, decode, **sampling)])["it"]


@pytest.mark.parametrize("decode", MODES, ids=lambda each: f"{each.mode}-{each.threshold}")
@pytest.mark.parametrize("which", [10, 100, 300])
def test_a_stop_string_cuts_text_tokens_logprobs_and_usage_at_one_place(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], bundled: Checkpoint, decode: DecodeParams, which: int
) -> None:
    whole = alone(make_engine(), prompts[which], decode, max_tokens=48, logprobs=1)
    for start in range(0, len(whole.text) - 3, 3):
        stop = whole.text[start : start + 3]
        cut = alone(make_engine(), prompts[which], decode, max_tokens=48, logprobs=1, stop=(stop,))
        texts = [bundled.tokenizer.decode(whole.tokens[:n]) for n in range(1, len(whole.tokens) + 1)]
        tokens = next(n for n, text in enumerate(texts, start=1) if stop in text)
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.tokens == whole.tokens[:tokens]
        assert [each.chosen for each in cut.logprobs] == pytest.approx(
            [each.chosen for each in whole.logprobs[:tokens]], abs=1e-4
        )
        assert (cut.finished.reason, cut.finished.tokens) == ("stop", tokens)


def test_what_was_accepted_at_masks_is_audited_by_what_one_token_at_a_time_says_there(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    engine, differ = make_engine(), 0
    for prompt in (prompts[10], prompts[300], prompts[470], tuple(range(300, 320))):
        found = alone(engine, prompt, EVERYTHING, max_tokens=24, logprobs=0)
        forwards = [each.forward for each in found.logprobs]
        at_masks = [n for n in range(1, len(forwards)) if forwards[n] == forwards[n - 1] < forwards[-1]]
        audits = [audit for chunk in found.chunks for audit in chunk.audits]
        assert [audit.index for audit in audits] == at_masks
        unverified = [len(chunk.tokens) - 1 for chunk in found.chunks]  # all but the first token of each step
        assert [dict(chunk.accepted) for chunk in found.chunks] == [{0.0: n} if n > 0 else {} for n in unverified]
        for audit in audits:
            one = alone(
                make_engine(), prompt + tuple(found.tokens[: audit.index]), DecodeParams(mode=Mode.AR), max_tokens=1
            )
            assert one.tokens == [audit.token]
            differ += audit.token != found.tokens[audit.index]
    assert differ, "a threshold of 0 takes tokens that the model would not"


@pytest.mark.parametrize("changed", [{"repetition_penalty": 1.5}, {"min_tokens": 24}], ids=str)
def test_choices_that_depend_on_more_than_the_logits_are_not_audited(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], changed: dict[str, Any]
) -> None:
    found = alone(make_engine(), prompts[10], EVERYTHING, max_tokens=24, logprobs=0, **changed)
    assert any(chunk.accepted for chunk in found.chunks)
    assert not [audit for chunk in found.chunks for audit in chunk.audits]


def test_a_stop_string_is_found_across_two_chunks(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    whole = alone(make_engine(), prompts[10], DecodeParams(threshold=0.0, block=3), max_tokens=30)
    first = "".join(chunk.text for chunk in whole.chunks[:2])
    stop = whole.text[len(first) - 1 : len(first) + 1]
    assert len(whole.chunks) > 3 and whole.text.index(stop) == len(first) - 1
    cut = alone(make_engine(), prompts[10], DecodeParams(threshold=0.0, block=3), max_tokens=30, stop=(stop,))
    assert cut.text == first[:-1]
    assert len(cut.chunks) == 3


def test_a_stop_string_is_found_across_a_character_of_several_tokens(
    make_engine: MakeEngine, bundled: Checkpoint
) -> None:
    # The bias makes the model say the tokens of the text one after the other, whatever it would rather say.
    said = bundled.tokenizer("é日x")["input_ids"]
    assert len(said) > 3
    for stop, kept in (("é", ""), ("日", "é"), ("日x", "é"), ("x", "é日")):
        engine = make_engine()
        text, tokens = "", []
        stream_request = request("it", (20, 21, 22), DecodeParams(mode=Mode.AR), stop=(stop,), max_tokens=len(said))
        engine.add(stream_request)
        sequence = next(iter(engine._scheduler.waiting))
        for token in said:
            tokens.append(token)
            text += sequence.detokenizer.push(token)
            if sequence.detokenizer.stopped:
                break
        assert text == kept
        assert bundled.tokenizer.decode(tokens) == kept + stop


@pytest.mark.parametrize("decode", MODES, ids=lambda each: f"{each.mode}-{each.threshold}")
def test_nothing_follows_an_end_of_sequence_in_mid_chunk(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], bundled: Checkpoint, decode: DecodeParams
) -> None:
    outputs = run(make_engine(), [request(n, p, decode, max_tokens=64) for n, p in enumerate(prompts[::25])])
    for output in outputs.values():
        ends = [number for number, token in enumerate(output.tokens) if token in bundled.stop_ids]
        assert ends in ([], [len(output.tokens) - 1])
        assert output.finished.reason == ("stop" if ends else "length")
        assert output.text == bundled.tokenizer.decode(output.tokens, skip_special_tokens=True)


@pytest.mark.parametrize("decode", MODES, ids=lambda each: f"{each.mode}-{each.threshold}")
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 11])
def test_max_tokens_ends_in_mid_chunk_at_exactly_so_many(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], decode: DecodeParams, max_tokens: int
) -> None:
    output = alone(make_engine(), prompts[10], decode, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    assert len(output.tokens) == len(output.logprobs) == output.finished.tokens == max_tokens
    assert output.finished.reason == "length"


def test_a_sequence_ends_with_the_context_of_the_model(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    engine = make_engine(max_kv_tokens=80)
    prompt = (prompts[0] * 3)[:60]
    output = alone(engine, prompt, max_tokens=500, ignore_eos=True)
    assert len(output.tokens) == 20
    assert output.finished.reason == "length"


def test_ignored_end_of_sequence_does_not_end(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    output = alone(make_engine(), prompts[0], DecodeParams(), max_tokens=64, ignore_eos=True)
    assert len(output.tokens) == 64


def test_no_stop_token_comes_before_min_tokens(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], bundled: Checkpoint
) -> None:
    for decode in MODES:
        output = alone(make_engine(), prompts[0], decode, max_tokens=60, min_tokens=40)
        assert not bundled.stop_ids & set(output.tokens[:40])
        assert len(output.tokens) >= 40


@torch.inference_mode()
@pytest.mark.parametrize("decode", MODES[:1] + MODES[3:], ids=lambda each: str(each.mode))
def test_logprobs_are_those_of_the_model_for_every_token(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], oracle: Checkpoint, decode: DecodeParams
) -> None:
    output = alone(make_engine(), prompts[100], decode, max_tokens=40, logprobs=3)
    ids = torch.tensor([list(prompts[100]) + output.tokens])
    logits_SV = oracle.network(ids).logits[0, len(prompts[100]) - 1 : -1]
    logits_SV[:, oracle.mask_id] = -torch.inf
    log_p_SV = logits_SV.log_softmax(dim=-1)
    for number, said in enumerate(output.logprobs):
        assert said.chosen == pytest.approx(float(log_p_SV[number, output.tokens[number]]), abs=1e-3)
        best = log_p_SV[number].topk(3)
        assert [token for token, _ in said.top] == best.indices.tolist()
        assert [value for _, value in said.top] == pytest.approx(best.values.tolist(), abs=1e-2)


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.8},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"logit_bias": {25: 3.0, 21: -100.0}},
        {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.4, "top_p": 0.9},
    ],
    ids=str,
)
def test_penalties_and_bias_inside_a_chunk_give_what_one_token_at_a_time_gives(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], asked: dict[str, Any]
) -> None:
    chosen = prompts[::63]
    outputs = {}
    for mode in (Mode.AR, Mode.EXACT):
        decode = DecodeParams(mode=mode, threshold=0.3, block=8)
        requests = [request(n, p, decode, max_tokens=40, **asked) for n, p in enumerate(chosen)]
        outputs[mode] = {name: each.tokens for name, each in run(make_engine(), requests).items()}
    assert outputs[Mode.EXACT] == outputs[Mode.AR]


def test_a_penalty_counts_the_tokens_of_its_own_chunk(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    free = alone(make_engine(), prompts[10], max_tokens=24, ignore_eos=True)
    kept = alone(make_engine(), prompts[10], max_tokens=24, ignore_eos=True, repetition_penalty=100.0)
    assert len(set(free.tokens)) < len(free.tokens)
    assert len(set(kept.tokens)) == len(kept.tokens)
    assert max(len(chunk.tokens) for chunk in kept.chunks) > 1


@pytest.mark.parametrize(
    "decode", [*MODES, DecodeParams(mode=Mode.EXACT)], ids=lambda each: f"{each.mode}-{each.block}"
)
def test_the_same_seed_gives_the_same_output_whatever_else_is_in_the_batch(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], decode: DecodeParams
) -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 41, "max_tokens": 32}
    by_itself = alone(make_engine(), prompts[200], decode, **asked)
    others = [request(n, p, MODES[n % 4], temperature=0.7, max_tokens=20) for n, p in enumerate(prompts[::30])]
    together = run(
        make_engine(max_num_seqs=6, max_prefill_tokens=48),
        [*others[:9], request("it", prompts[200], decode, **asked), *others[9:]],
    )
    assert together["it"].tokens == by_itself.tokens


def test_n_sequences_draw_as_requests_with_consecutive_seeds_do(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    together = run(make_engine(), [request("a", prompts[200], n=3, seed=7, temperature=4.0, max_tokens=24)])
    for index in range(3):
        single = alone(make_engine(), prompts[200], DecodeParams(), seed=7 + index, temperature=4.0, max_tokens=24)
        assert together[f"a/{index}"].tokens == single.tokens
    assert len({tuple(each.tokens) for each in together.values()}) > 1


@pytest.mark.slow
def test_sampling_in_exact_mode_draws_from_the_distribution_of_autoregressive_sampling(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    # 600 independent draws of each kind; the fourth token depends on three before it and is drafted in exact mode.
    seen: dict[Mode, Counter[tuple[int, ...]]] = {}
    for mode, first_seed in ((Mode.AR, 0), (Mode.EXACT, 1_000_000)):
        decode = DecodeParams(mode=mode, threshold=0.0, block=8)
        requests = [
            request(
                n, prompts[470], decode, max_tokens=4, ignore_eos=True, temperature=6.0, top_k=5, seed=first_seed + n
            )
            for n in range(600)
        ]
        seen[mode] = Counter(tuple(each.tokens[2:]) for each in run(make_engine(), requests).values())
    kinds = [kind for kind, count in (seen[Mode.AR] + seen[Mode.EXACT]).items() if count >= 20]
    assert len(kinds) > 3
    rare = [sum(seen[mode].values()) - sum(seen[mode][kind] for kind in kinds) for mode in seen]
    table = [[*(seen[mode][kind] for kind in kinds), left + 1] for mode, left in zip(seen, rare, strict=True)]
    assert chi2_contingency(table).pvalue > 1e-4


def test_exact_sampling_with_a_seed_gives_the_very_sample_of_autoregressive_decoding(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    outputs = {}
    for mode in (Mode.AR, Mode.EXACT):
        decode = DecodeParams(mode=mode, threshold=0.5)
        requests = [request(n, p, decode, temperature=1.0, seed=n, max_tokens=32) for n, p in enumerate(prompts[::12])]
        done = run(make_engine(), requests)
        outputs[mode] = {name: each.tokens for name, each in done.items()}
    assert outputs[Mode.EXACT] == outputs[Mode.AR]
    assert sum(each.finished.forwards for each in done.values()) < 0.6 * sum(len(each.tokens) for each in done.values())


def outputs_at(engine: Engine, prompts: list[tuple[int, ...]], threshold: float) -> list[Output]:
    """Decode every prompt; a threshold of 1 is exact."""
    decode = DecodeParams(threshold=threshold, block=16)
    outputs = run(engine, [request(n, p, decode, max_tokens=64) for n, p in enumerate(prompts)])
    return [outputs[str(n)] for n in range(len(prompts))]


def tokens_per_forward(outputs: list[Output]) -> float:
    return sum(len(each.tokens) for each in outputs) / sum(each.finished.forwards for each in outputs)


def predicted(engine: Engine, threshold: float) -> float:
    return engine.profile.points()[GRID.index(threshold)].tokens_per_forward


@pytest.mark.slow
@pytest.mark.parametrize("running", [1.0, 0.95])
def test_the_profile_predicts_other_thresholds_within_a_few_percent(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], running: float
) -> None:
    engine, prompts = make_engine(), prompts[::4]
    said = outputs_at(engine, prompts, running)
    for threshold in (1.0, 0.95, 0.8, 0.6):
        outputs = said if threshold == running else outputs_at(make_engine(), prompts, threshold)
        assert predicted(engine, threshold) == pytest.approx(tokens_per_forward(outputs), rel=0.08), threshold
        # After a wrong token the model is less sure of what follows, which only the threshold that accepts it can show.
        same = [number for number, each in enumerate(outputs) if each.tokens == said[number].tokens]
        assert len(same) > 0.75 * len(prompts)
        engine_of_same = engine
        if len(same) < len(prompts):
            engine_of_same = make_engine()
            outputs_at(engine_of_same, [prompts[number] for number in same], running)
        measured = tokens_per_forward([outputs[number] for number in same])
        # What is trusted leaves a sequence at other places than what is verified, so one tells less of the other; and
        # behind drafts that turn out wrong against all odds there are no masks to learn from. Among trusted tokens it
        # predicts too few at lower thresholds, 2 to 4 % on five sets of these prompts: at 0.95 a forward begins behind
        # an unsure token more often than at 0.6.
        tolerance = 0.03 if threshold == running else 0.05 if threshold < 1.0 and running < 1.0 else 0.08
        assert predicted(engine_of_same, threshold) == pytest.approx(measured, rel=tolerance), threshold


@torch.inference_mode()
def test_audited_agreement_is_what_a_full_recompute_finds(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], oracle: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "AUDIT_EVERY", 1)
    engine, chosen = make_engine(), prompts[::4]
    decode = DecodeParams(threshold=0.5, block=8)
    outputs = run(engine, [request(n, p, decode, max_tokens=40) for n, p in enumerate(chosen)])
    agreed = said = 0
    for number, prompt in enumerate(chosen):
        tokens = outputs[str(number)].tokens
        logits_SV = oracle.network(torch.tensor([list(prompt) + tokens])).logits[0, len(prompt) - 1 : -1]
        agreed += int((logits_SV.argmax(dim=-1) == torch.tensor(tokens)).sum())
        said += len(tokens)
    point = engine.profile.points()[GRID.index(0.5)]
    assert point.agreement == pytest.approx(agreed / said, abs=0.02)
    assert point.audited > said / 3


def test_bad_requests_are_refused_before_any_work(make_engine: MakeEngine) -> None:
    engine = make_engine(max_waiting_seqs=4)
    wrong = [
        (PromptTooLongError, "2048 tokens", request(1, [5] * 2048)),
        (RequestError, "empty", request(2, [])),
        (RequestError, "token 1024", request(3, [1024])),
        (RequestError, "n x max_tokens is 4 x 60000", request(4, [5], n=4, max_tokens=60000)),
        (RequestError, "n is 5", request(5, [5], n=5)),
    ]
    for kind, said, each in wrong:
        with pytest.raises(kind, match=said):
            engine.add(each)
    assert not engine.busy
    engine.add(request(6, [5]))
    with pytest.raises(RequestError, match="already here"):
        engine.add(request(6, [5]))
    with pytest.raises(QueueFullError, match="1 waiting sequences, of at most 4; 4 more"):
        engine.add(request(7, [5], n=4))
    with pytest.raises(ConfigError, match="threshold is"):
        engine.set_thresholds({"standard": 1.5})


class Poisoned(Exception):
    """What the test's network raises."""


def test_a_request_that_makes_the_network_fail_fails_alone(
    make_torch_engine: MakeEngine, prompts: list[tuple[int, ...]], bundled_for_torch: Checkpoint
) -> None:
    poison = 77

    def check(_module: object, _args: object, given: dict[str, torch.Tensor]) -> None:
        if (given["input_ids"] == poison).any():
            raise Poisoned("it tastes bad")

    healthy = run(make_torch_engine(), [request(n, prompts[n * 50], max_tokens=20) for n in range(4)])
    hook = bundled_for_torch.network.register_forward_pre_hook(check, with_kwargs=True)
    try:
        engine = make_torch_engine()
        bad = request("bad", (*prompts[3], poison), max_tokens=20)
        outputs = run(engine, [bad, *(request(n, prompts[n * 50], max_tokens=20) for n in range(4))])
        assert isinstance(outputs["bad"].finished.error, StepError)
        assert "Poisoned: it tastes bad" in str(outputs["bad"].finished.error)
        assert [outputs[str(n)].tokens for n in range(4)] == [healthy[str(n)].tokens for n in range(4)]
        assert alone(engine, prompts[0], DecodeParams(), max_tokens=20).tokens == healthy["0"].tokens
    finally:
        hook.remove()


def test_scheduling_that_never_works_ends_every_request_with_the_reason(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()

    def broken(*_: object) -> None:
        raise RuntimeError("no plan")

    monkeypatch.setattr(engine._scheduler, "schedule", broken)
    for number, prompt in enumerate(prompts[:3]):
        engine.add(request(str(number), prompt))
    chunks = engine.step()
    assert [chunk.finished and str(chunk.finished.error) for chunk in chunks] == [
        "decoding failed: RuntimeError: no plan. The engine serves other requests."
    ] * 3
    assert not engine.busy


def test_memory_that_ends_when_the_cache_grows_fails_what_runs_and_serves_what_waits(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_num_seqs=1)
    resize, failures = engine._forwards.cache.resize, iter([True])

    def no_memory(slots: int, width: int) -> None:
        if width > 256 and next(failures, False):
            raise MemoryError("no memory")
        resize(slots, width)

    monkeypatch.setattr(engine._forwards.cache, "resize", no_memory)
    outputs = run(engine, [request("long", [20] * 300, max_tokens=4), request("next", prompts[0], max_tokens=4)])
    assert "no memory" in str(outputs["long"].finished.error)
    assert outputs["next"].finished.reason in ("stop", "length")


def test_cancelling_frees_the_slot_at_once(make_engine: MakeEngine, prompts: list[tuple[int, ...]]) -> None:
    engine = make_engine(max_num_seqs=1)
    for name in ("a", "b"):
        engine.add(request(name, prompts[0], max_tokens=64, ignore_eos=True))
    engine.step()
    engine.cancel("a")
    assert engine.running == 0
    chunks = engine.step()
    assert [(chunk.request_id, chunk.finished and chunk.finished.reason) for chunk in chunks] == [
        ("a", "cancelled"),
        ("b", None),
    ]
    engine.cancel("never heard of")


def test_an_id_that_is_free_again_belongs_to_the_new_request(
    make_engine: MakeEngine, prompts: list[tuple[int, ...]]
) -> None:
    engine = make_engine()
    engine.add(request("a", prompts[0], max_tokens=64, ignore_eos=True))
    engine.step()
    engine.cancel("a")
    engine.add(request("a", prompts[1], max_tokens=4, ignore_eos=True))
    ends = [chunk.finished.reason for _ in range(9) for chunk in engine.step() if chunk.finished]
    assert ends == ["length"]
