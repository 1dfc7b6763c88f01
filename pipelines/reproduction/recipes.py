"""The recipes to train, one for each line of the table, all at one budget.

All recipes except the drafts start from the AR checkpoint of the bundled model, as MARS in the paper starts from an AR
checkpoint of the same data. The budget is the compute of one pass of MARS over new examples; recipes that spend it
differently say so. The compute of the answers that `own-8` is trained on is not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

BLOCKS = (4, 8, 16)
"""The block sizes of the paper."""
PASS = 1.0
"""Passes over the data in the budget of MARS."""
LONG = 4.6
"""Passes with the same number of steps as the training of the bundled model."""
COST = 1.7
"""Cost of a step of MARS, in steps of AR SFT."""
BASE = "ar"
"""The recipe that other recipes start from: AR SFT itself."""
DRAFT = "draft"
"""The start of draft models: a small network with random weights."""

Kind = Literal["streams", "diffusion", "medusa"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Recipe for one model per seed."""

    name: str
    about: str
    start: str = BASE
    """Recipe whose model training starts from, or `BASE` or `DRAFT`."""
    kind: Kind = "streams"
    objective: dict[str, Any] = field(default_factory=dict)
    """Fields of `ObjectiveSection`; `block` for diffusion, `heads` for Medusa."""
    passes: float = PASS
    learning_rate: float = 1e-3
    own_answers: bool = False
    """True to train on the answers of the AR model instead of the references."""


def recipes() -> Iterator[Recipe]:
    """Yield the recipes, each after the recipes that it starts from."""
    yield Recipe(name="ar-longer", about="AR SFT with MARS's compute", objective={"kind": "ar"}, passes=PASS * COST)
    for block in BLOCKS:
        yield Recipe(name=f"mars-{block}", about=f"MARS, B = {block}, as in the paper", objective=_mars(block))
    for block in BLOCKS:
        yield Recipe(
            name=f"mask-only-{block}",
            about=f"MARS without the AR loss, B = {block}",
            objective=_mars(block, ar_weight=0),
        )
    yield Recipe(name="diffusion-4", about="block diffusion, B = 4", kind="diffusion", objective={"block": 4})
    yield Recipe(name="medusa", about="Medusa heads on the AR model", kind="medusa", objective={"heads": 7}, passes=1.8)
    yield Recipe(
        name="draft-ar",
        about="a draft of a twentieth of the size, AR from random weights, for longer",
        start=DRAFT,
        objective={"kind": "ar"},
        passes=5 * PASS,
        learning_rate=3e-3,
    )
    yield Recipe(name="draft-mars-4", about="the same draft, MARS, B = 4", start="draft-ar", objective=_mars(4))
    yield from _beyond()
    yield from _long()


def _beyond() -> Iterator[Recipe]:
    """Yield variants beyond the paper. Each changes one setting of `mars-8`, `random-16` or `mars-16`."""
    yield Recipe(name="random-8", about="random block phase, B = 8", objective=_mars(8, phase="random"))
    yield Recipe(name="decay-8", about="a mask weighs 0.8 of the one before it, B = 8", objective=_mars(8, decay=0.8))
    yield Recipe(
        name="distill-8", about="the clean stream teaches the noisy one, B = 8", objective=_mars(8, distill=1.0)
    )
    yield Recipe(
        name="own-8",
        about="targets are the AR model's own answers, B = 8",
        objective=_mars(8),
        own_answers=True,
    )
    yield Recipe(name="random-16", about="random block phase, B = 16", objective=_mars(16, phase="random"))
    yield Recipe(
        name="distill-16",
        about="random block phase, the clean stream teaches, B = 16",
        objective=_mars(16, phase="random", distill=1.0),
    )
    yield Recipe(
        name="growth-16",
        about="random block phase, blocks that grow from 3 to B = 16",
        objective=_mars(16, phase="random", growth=True),
    )


def _long() -> Iterator[Recipe]:
    """Yield our best variant and the paper's best block, both trained for as long as the bundled model."""
    yield Recipe(name="mars-8-long", about="MARS, B = 8, as in the paper, for longer", objective=_mars(8), passes=LONG)
    yield Recipe(
        name="best",
        about="growing to B = 16, random block phase, the clean stream teaches, for longer",
        objective=_mars(16, phase="random", growth=True, distill=1.0),
        passes=LONG * 0.93,  # its steps take slightly longer
    )


def _mars(block: int, **changes: Any) -> dict[str, Any]:
    """Return the objective of the paper with changes."""
    return {"kind": "mars", "block": block, "phase": "absolute", "growth": False} | changes
