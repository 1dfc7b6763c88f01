"""Distributions against the warpers of transformers, penalties against theirs and loops, draws against counting."""

from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.engine.sampling.sampler import (
    SamplingPosition,
    draw,
    has_penalties,
    is_greedy,
    positions_of,
    probabilities,
    process_logits,
    sample,
    uniform,
)
from mars_ray.method.acceptance import confidence
from mars_ray.method.metric import Metric
from tests.engine.engine_parts import sequence_of

VOCABULARY = 40
SEEDS = st.integers(0, 2**32)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)
DRAWN = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, VOCABULARY + 5),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1)),
)


def random_logits(seed: int, rows: int = 1, banned: int | None = 3) -> Tensor:
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    if banned is not None:
        logits[:, banned] = -torch.inf
    return logits


def warped(logits_1V: Tensor, sampling: SamplingParams) -> Tensor:
    """What transformers draws from, in double precision. Discards examples where rounding decides who is in."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        before = steps(None, logits_1V.double()).softmax(-1).sort().values.cumsum(-1)
        assume((before - (1 - sampling.top_p)).abs().min() > 1e-5)
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        p_1V = steps(None, logits_1V.double()).softmax(-1)
        near = (p_1V / p_1V.max() / sampling.min_p - 1).abs() < 1e-4
        assume(not near[p_1V < p_1V.max()].any())
        steps.append(MinPLogitsWarper(sampling.min_p))
    return steps(None, logits_1V.double()).softmax(-1)


@given(SEEDS, DRAWN)
def test_the_distribution_is_that_of_the_warpers_of_transformers(seed: int, sampling: SamplingParams) -> None:
    logits = random_logits(seed)
    p_1V = probabilities(logits.clone(), [sampling])
    wanted_1V = warped(logits, sampling)
    assert (p_1V > 1e-12).tolist() == (wanted_1V > 1e-12).tolist()
    torch.testing.assert_close((p_1V / p_1V.sum()).double(), wanted_1V, atol=1e-5, rtol=1e-4)


@given(SEEDS, st.lists(DRAWN, min_size=2, max_size=5))
def test_the_distribution_of_a_row_does_not_depend_on_the_other_rows(seed: int, sampling: list[SamplingParams]) -> None:
    logits = random_logits(seed, rows=len(sampling))
    together = probabilities(logits.clone(), sampling)
    alone = [probabilities(logits[row : row + 1].clone(), [each]) for row, each in enumerate(sampling)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-7, rtol=1e-6)


@given(SEEDS, st.lists(st.tuples(DRAWN, st.floats(0, 0.999999)), min_size=2, max_size=5))
def test_the_draw_of_a_row_does_not_depend_on_the_other_rows(
    seed: int, rows: list[tuple[SamplingParams, float]]
) -> None:
    sampling, uniforms = [SamplingParams(), *(row[0] for row in rows)], [0.0, *(row[1] for row in rows)]
    logits = random_logits(seed, rows=len(sampling))
    alone = [draw(logits[row : row + 1], [sampling[row]], [uniforms[row]]).item() for row in range(len(sampling))]
    assert draw(logits, sampling, uniforms).tolist() == alone


@given(SEEDS, DRAWN)
def test_evenly_spread_draws_reproduce_the_distribution(seed: int, sampling: SamplingParams) -> None:
    logits, N = random_logits(seed), 1000
    p_V = probabilities(logits.clone(), [sampling])[0].double()
    tokens = draw(logits.expand(N, -1), [sampling] * N, [(i + 0.5) / N for i in range(N)])
    share_V = torch.bincount(tokens, minlength=VOCABULARY) / N
    assert (share_V - p_V / p_V.sum()).abs().max() <= 1.001 / N
    assert (p_V[tokens] > 0).all(), "no token without a probability is drawn"


@given(SEEDS, DRAWN, st.sampled_from([0.0, 2.0**-53, 1 - 2.0**-53]))
def test_the_ends_of_the_unit_interval_draw_a_possible_token(
    seed: int, sampling: SamplingParams, number: float
) -> None:
    logits = random_logits(seed)
    (token,) = draw(logits, [sampling], [number]).tolist()
    assert probabilities(logits, [sampling])[0, token] > 0


@given(SEEDS, DRAWN)
def test_the_most_likely_token_has_the_smallest_draws(seed: int, sampling: SamplingParams) -> None:
    logits = random_logits(seed)
    assert draw(logits, [sampling], [0.0]).item() == logits.argmax().item()


def test_without_temperature_the_most_likely_token_is_taken_whatever_else_is_asked() -> None:
    logits = random_logits(5, rows=3)
    sampling = [SamplingParams(), SamplingParams(top_k=5, top_p=0.5), SamplingParams(min_p=0.5)]
    assert draw(logits, sampling, [0.9] * 3).tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    "extreme", [{"temperature": 1e-30}, {"temperature": 1e-60}, {"top_p": 1e-30}, {"top_p": 1e-60}, {"min_p": 1.0}]
)
def test_the_extremes_a_request_may_ask_for_take_the_most_likely_token(extreme: dict[str, float]) -> None:
    logits = random_logits(5, banned=0)
    sampling = SamplingParams(**({"temperature": 1.0} | extreme))  # type: ignore[arg-type]
    assert draw(logits, [sampling], [0.7]).item() == logits.argmax().item()


def test_equal_logits_stay_in_or_out_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    p_1V = probabilities(logits, [SamplingParams(temperature=1, top_k=2)])
    assert (p_1V[0] > 0).tolist() == [True, True, True, False]


def test_draws_are_the_same_for_the_same_seed_and_number_and_differ_otherwise() -> None:
    draws = {(seed, number): uniform(seed, number) for seed in (0, 1, 2**63, 2**64 - 1) for number in range(50)}
    assert len(set(draws.values())) == len(draws)
    assert all(uniform(*key) == value for key, value in draws.items())


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_draws_lie_in_the_unit_interval_without_its_end(seed: int, number: int) -> None:
    assert 0 <= uniform(seed, number) < 1


def test_draws_are_uniform_along_a_sequence_and_across_seeds_and_not_correlated() -> None:
    along, across = ([uniform(7, k) for k in range(2000)], [uniform(k, 7) for k in range(2000)])
    assert min(stats.kstest(each, "uniform").pvalue for each in (along, across)) > 0.01
    assert stats.pearsonr(along[1:], along[:-1]).pvalue > 0.01


def test_draws_of_a_sequence_are_numbered_by_its_output() -> None:
    said = sequence_of([1, 2], [3, 4], temperature=1.0, seed=9)
    assert [at.uniform for at in positions_of(said, 3, 0)] == [uniform(9, number) for number in (2, 3, 4)]
    assert [at.uniform for at in positions_of(said, 2, 5)] == [uniform(9, number) for number in (7, 8)]


def penalised_by_hand(logits_1V: Tensor, prompt: list[int], output: list[int], sampling: SamplingParams) -> Tensor:
    ids = torch.tensor([[*prompt, *output]])
    penalised_1V = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, logits_1V.clone())
    for token in range(VOCABULARY):
        count = output.count(token)
        penalised_1V[0, token] -= sampling.frequency_penalty * count
        penalised_1V[0, token] -= sampling.presence_penalty if count else 0
        penalised_1V[0, token] += sampling.logit_bias.get(token, 0)
    return penalised_1V


PENALTIES = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 0.7]),
        "frequency_penalty": st.sampled_from([-1.0, 0.0, 0.4]),
        "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=4),
    }
)


@given(SEEDS, st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8), TOKENS, TOKENS, PENALTIES)
def test_penalties_and_bias_are_those_of_transformers_and_of_loops_with_what_the_step_kept(
    seed: int, prompt: list[int], output: list[int], accepted: list[int], asked: dict[str, Any]
) -> None:
    said = sequence_of(prompt, output, **asked)
    logits = random_logits(seed)
    wanted = penalised_by_hand(logits, prompt, output + accepted, said.request.sampling)
    process_logits(logits, said, len(accepted), accepted)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-5)


@given(SEEDS, TOKENS, TOKENS, PENALTIES, st.integers(0, 12))
def test_a_token_kept_in_this_step_counts_like_one_kept_before(
    seed: int, output: list[int], accepted: list[int], asked: dict[str, Any], min_tokens: int
) -> None:
    asked = asked | {"min_tokens": min_tokens, "stop_token_ids": frozenset({4, 5})}
    now, before = random_logits(seed), random_logits(seed)
    process_logits(
        now, sequence_of([1, 2], output, **asked), len(accepted), accepted if is_sequential_of(asked) else ()
    )
    process_logits(before, sequence_of([1, 2], output + accepted, **asked), 0)
    assert torch.equal(now, before)


@pytest.mark.parametrize("by", [0.01, 100.0])
def test_the_extremes_of_the_repetition_penalty_leave_every_logit_a_number(by: float) -> None:
    logits = torch.tensor([[-torch.inf, -5.0, 0.0, 5.0]])
    process_logits(logits, sequence_of([0, 1, 2, 3], repetition_penalty=by), 0)
    assert not logits.isnan().any()
    assert logits.amax().isfinite()


def is_sequential_of(asked: dict[str, Any]) -> bool:
    return has_penalties(SamplingParams(**asked))  # type: ignore[arg-type]


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 4), st.integers(1, 6))
@example(min_tokens=3, said=0, ahead=0, count=6)
def test_stop_tokens_are_banned_at_exactly_the_first_min_tokens_outputs(
    min_tokens: int, said: int, ahead: int, count: int
) -> None:
    sequence = sequence_of([1], [9] * said, min_tokens=min_tokens, stop_ids=[4, 6])
    logits = torch.zeros(count, VOCABULARY)
    process_logits(logits, sequence, ahead)
    banned = [(logits[number] == -torch.inf).nonzero().flatten().tolist() for number in range(count)]
    assert banned == [[4, 6] if said + ahead + number < min_tokens else [] for number in range(count)]


def test_a_banned_stop_token_stays_banned_under_any_bias() -> None:
    logits = torch.zeros(1, VOCABULARY)
    process_logits(logits, sequence_of([1], min_tokens=1, stop_ids=[4], logit_bias={4: 100.0}), 0)
    assert logits[0, 4] == -torch.inf


@pytest.mark.parametrize(
    ("asked", "output", "plain"),
    [
        ({}, [], True),
        ({"temperature": 0.5}, [], False),
        ({"logit_bias": {3: 1.0}}, [], False),
        ({"presence_penalty": 0.1}, [], False),
        ({"frequency_penalty": -0.1}, [], False),
        ({"repetition_penalty": 1.1}, [], False),
        ({"min_tokens": 2}, [5], False),
        ({"min_tokens": 2}, [5, 6], True),
        ({"decode": DecodeParams(metric=Metric.MARGIN, threshold=0.5)}, [], False),
    ],
)
def test_a_request_is_plain_when_the_most_likely_token_and_its_probability_suffice(
    asked: dict[str, Any], output: list[int], plain: bool
) -> None:
    assert is_greedy(sequence_of([1], output, **asked)) is plain


@given(SEEDS, st.lists(st.sampled_from(Metric), min_size=1, max_size=5))
def test_a_proposal_has_the_confidence_of_its_own_metric_and_knows_whether_the_model_foresaw_it(
    seed: int, metrics: list[Metric]
) -> None:
    logits = random_logits(seed, rows=len(metrics))
    sampling = SamplingParams(temperature=1.0)
    positions = [SamplingPosition(sampling, metric, 0.8) for metric in metrics]
    best = logits.argmax(dim=-1).tolist()
    proposals = sample(logits, best, positions)
    for number, (proposal, metric) in enumerate(zip(proposals, metrics, strict=True)):
        assert proposal.confidence == pytest.approx(confidence(logits[number], metric).item(), abs=1e-6)
        assert proposal.is_argmax == (proposal.token == best[number])
