"""The bundled model: one network for engines, which replace its attention, and one for the oracle."""

from collections.abc import Iterator
from functools import partial

import pytest

from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.grammar.matcher import Grammars
from mars_ray.engine.kernels.families import VARIABLE, KernelError, supported_families
from mars_ray.evaluation.calibration import heldout_examples
from mars_ray.model.checkpoint import Checkpoint
from tests.factories.engine import MakeEngine, Prompts, as_unknown, bundled_checkpoint, engine_of

try:
    SUPPORTED = [family.name for family in supported_families()]
except KernelError:
    SUPPORTED = []
FAST = {*SUPPORTED[:1], *SUPPORTED[-1:]}
"""The best family and the one with the fewest instructions; make test-slow tests those between them."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in SUPPORTED],
)
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each family of kernels that this processor supports, chosen by the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, request.param)
        yield request.param


@pytest.fixture(scope="session")
def bundled() -> Checkpoint:
    return bundled_checkpoint()


@pytest.fixture(scope="session")
def oracle() -> Checkpoint:
    return bundled_checkpoint()


@pytest.fixture
def make_engine(bundled: Checkpoint) -> MakeEngine:
    return partial(engine_of, bundled, threshold=0.95)


@pytest.fixture(scope="session")
def bundled_for_torch() -> Checkpoint:
    """The bundled model as a class of its own, which the kernels do not know."""
    return as_unknown(bundled_checkpoint())


@pytest.fixture
def make_torch_engine(bundled_for_torch: Checkpoint) -> MakeEngine:
    return partial(engine_of, bundled_for_torch, threshold=0.95)


@pytest.fixture(scope="session")
def prompts(bundled: Checkpoint) -> Prompts:
    """504 held-out prompts, 42 of each family without tools, one family after the other."""
    encoder = ChatEncoder(bundled.tokenizer)
    examples = [each for each in heldout_examples(42, seed=11) if not each.tools]
    return Prompts(tuple(encoder.prompt(each.messages)) for each in examples)


@pytest.fixture(scope="session")
def grammars(bundled: Checkpoint) -> Grammars:
    return Grammars(bundled, bundled.network.config.vocab_size)
