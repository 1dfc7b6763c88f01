"""With an adapter the threshold is the least share of the best token's probability that a draft needs to be kept."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mars_ray.engine.core.engine import Engine
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.method.reference import last_logits
from mars_ray.model.checkpoint import Checkpoint
from tests.engine.test_adapter import some_adapter
from tests.factories.cards import adapter_card
from tests.factories.engine import Output, engine_of, request, run

ROUNDING = 1.02
"""Kernels and torch round differently, so ratios differ a little."""


@pytest.fixture(scope="module")
def adapted(bundled: Checkpoint) -> Engine:
    """An engine whose adapter predicts a little worse than the model, so that some drafts are wrong."""
    assert bundled.card is not None
    adapter = replace(some_adapter(bundled, std=0.03), card=adapter_card(block=bundled.card.block))
    return engine_of(bundled, {"adapters": {None: adapter}})


def answers(engine: Engine, prompts: list[tuple[int, ...]], decode: DecodeParams, **sampling: Any) -> list[Output]:
    engine.clear_cache()
    sampling = {"max_tokens": 32} | sampling
    outputs = run(engine, [request(number, prompt, decode, **sampling) for number, prompt in enumerate(prompts)])
    return [outputs[str(number)] for number in range(len(prompts))]


def ratios(oracle: Checkpoint, prompt: tuple[int, ...], tokens: list[int]) -> list[float]:
    """Return the probability of each token, divided by that of the most likely one, in one forward over all."""
    ids = [*prompt, *tokens]
    logits = last_logits(oracle.network, ids[:-1], len(tokens), oracle.mask_id)
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    found: list[float] = (chosen - logits.amax(dim=-1)).exp().tolist()
    return found


@pytest.mark.parametrize("threshold", [0.5, 0.1])
def test_every_token_is_as_likely_as_the_threshold_demands_and_some_are_not_the_best(
    threshold: float, adapted: Engine, oracle: Checkpoint, prompts: list[tuple[int, ...]]
) -> None:
    chosen = prompts[::16]
    outputs = answers(adapted, chosen, DecodeParams(threshold=threshold, block=6))
    found = [
        ratio for prompt, output in zip(chosen, outputs, strict=True) for ratio in ratios(oracle, prompt, output.tokens)
    ]
    assert threshold / ROUNDING <= min(found) < 1 / ROUNDING
    counted = sum(count for output in outputs for chunk in output.chunks for _, count in chunk.accepted)
    assert counted == sum(ratio < 1 for ratio in found)


def test_a_threshold_of_0_takes_fewer_forwards(adapted: Engine, prompts: list[tuple[int, ...]]) -> None:
    forwards = []
    for threshold in (1.0, 0.0):
        outputs = answers(adapted, prompts[::16], DecodeParams(threshold=threshold, block=6), ignore_eos=True)
        forwards.append(sum(output.finished.forwards for output in outputs))
    assert forwards[1] < forwards[0]


def test_a_draw_never_leaves_the_tokens_that_a_request_allows(adapted: Engine, prompts: list[tuple[int, ...]]) -> None:
    only_best: dict[str, Any] = {"temperature": 1.0, "top_k": 1, "seed": 3}
    expected = answers(adapted, prompts[::16], DecodeParams(mode=Mode.AR))
    outputs = answers(adapted, prompts[::16], DecodeParams(threshold=0.01), **only_best)
    assert [output.tokens for output in outputs] == [output.tokens for output in expected]


def test_draws_keep_likely_drafts_too(adapted: Engine, prompts: list[tuple[int, ...]]) -> None:
    drawn: dict[str, Any] = {"temperature": 0.7, "seed": 3}
    strict, lenient = (
        answers(adapted, prompts[::16], DecodeParams(threshold=threshold, block=6), **drawn) for threshold in (1.0, 0.1)
    )
    assert [output.tokens for output in strict] != [output.tokens for output in lenient]


@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": 0.5},
        {"grammar": GrammarSpec(kind="regex", text="[a-z ,.]{40,60}")},
        {"logit_bias": {7: -100.0}},
    ],
    ids=["penalty", "grammar", "bias"],
)
def test_a_request_keeps_its_constraints(
    sampling: dict[str, Any], adapted: Engine, prompts: list[tuple[int, ...]]
) -> None:
    lenient = answers(adapted, prompts[::16], DecodeParams(threshold=0.0, block=6), **sampling)
    if "logit_bias" in sampling:
        assert not any(7 in output.tokens for output in lenient)
    else:  # later choices depend on earlier ones, so drafts are verified strictly
        expected = answers(adapted, prompts[::16], DecodeParams(mode=Mode.AR), **sampling)
        assert [output.tokens for output in lenient] == [output.tokens for output in expected]
