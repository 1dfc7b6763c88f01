"""A model without a card or an adapter has no masks: whatever a request sets, its answers are exact."""

from dataclasses import replace

import pytest

from mars_ray.engine.core.engine import Engine
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.model.checkpoint import Checkpoint
from tests.factories.engine import engine_of, request, run


@pytest.fixture
def engine(bundled: Checkpoint) -> Engine:
    return engine_of(replace(bundled, card=None))


DECODES = [
    DecodeParams(),
    DecodeParams(mode=Mode.EXACT),
    DecodeParams(mode=Mode.EXACT, block=8),
    DecodeParams(threshold=0.3),
    DecodeParams(threshold=0.0, block=8),
]


@pytest.mark.parametrize("decode", DECODES, ids=str)
def test_answers_are_those_of_one_token_at_a_time_without_masks(
    engine: Engine, prompts: list[tuple[int, ...]], decode: DecodeParams
) -> None:
    chosen = [(*prompt, *prompt[5:]) for prompt in prompts[::60]]
    answers = []
    for mode in (DecodeParams(mode=Mode.AR), decode):
        outputs = run(engine, [request(n, prompt, mode, max_tokens=24, seed=1) for n, prompt in enumerate(chosen)])
        assert not any(chunk.masks for output in outputs.values() for chunk in output.chunks)
        answers.append([output.tokens for output in outputs.values()])
    assert answers[0] == answers[1]
    assert "text" in [counts.source for counts in engine.state().drafts], "which needs no masks"


def test_its_block_is_1(engine: Engine) -> None:
    assert engine.block == engine.state().block == 1
