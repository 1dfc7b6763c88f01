"""The bundled model: one network for engines, which replace its attention, and one for the oracle."""

from typing import Any

import pytest

from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.grammar.matcher import Grammars
from mars_ray.engine.options import EngineOptions
from mars_ray.evaluation.calibration.prompts import heldout_examples
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import resolve_model
from tests.engine_samples import MakeEngine, Prompts


@pytest.fixture(scope="session")
def bundled() -> Checkpoint:
    return load_checkpoint(resolve_model("bundled"))


@pytest.fixture(scope="session")
def oracle() -> Checkpoint:
    return load_checkpoint(resolve_model("bundled"))


@pytest.fixture
def make_engine(bundled: Checkpoint) -> MakeEngine:
    def make(**options: Any) -> Engine:
        return Engine(bundled, EngineOptions(**({"compiled": False, "threshold": 0.95} | options)), new_seed=lambda: 0)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def bundled_for_torch() -> Checkpoint:
    """The bundled model as a class of its own, which the kernels do not know."""
    checkpoint = load_checkpoint(resolve_model("bundled"))
    checkpoint.network.__class__ = type("Unknown", (type(checkpoint.network),), {})
    return checkpoint


@pytest.fixture
def make_torch_engine(bundled_for_torch: Checkpoint) -> MakeEngine:
    def make(**options: Any) -> Engine:
        given = {"compiled": False, "threshold": 0.95} | options
        return Engine(bundled_for_torch, EngineOptions(**given), new_seed=lambda: 0)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def prompts(bundled: Checkpoint) -> Prompts:
    """504 held-out prompts, 42 of each family, one family after the other."""
    encoder = ChatEncoder(bundled.tokenizer)
    examples = heldout_examples(42, seed=11)
    return Prompts(tuple(encoder.prompt([{"role": "user", "content": each.prompt}])) for each in examples)


@pytest.fixture(scope="session")
def grammars(bundled: Checkpoint) -> Grammars:
    return Grammars(bundled, bundled.network.config.vocab_size)
