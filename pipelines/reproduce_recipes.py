"""What `reproduce.py` trains: each recipe a row of the table, all of them at one budget.

All begin with the AR checkpoint of the bundled model, as the paper begins with an instruction model. The budget is the
paper's in small: one pass of autoregressive fine-tuning, then half a pass of MARS, whose forward holds up to twice the
tokens. What takes a different way spends the same compute in another manner, and says how.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

BLOCKS = (4, 8, 16)
"""Those of the paper."""
PASS = 1.0
"""Of autoregressive fine-tuning over the data."""
HALF = 0.5
"""Of MARS. A step of it takes 1.7 times as long as an autoregressive one."""
COST = 1.7

BASE, DRAFT = "base", "draft"

Kind = Literal["streams", "diffusion", "medusa"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One model of every seed."""

    name: str
    about: str
    start: str = "ar"
    """The recipe it goes on from; or `BASE`, or `DRAFT`, which is a small network with random weights."""
    kind: Kind = "streams"
    objective: dict[str, Any] = field(default_factory=dict)
    """See `ObjectiveSection`."""
    passes: float = HALF
    learning_rate: float = 1e-3
    answers_of: str | None = None
    """A recipe whose model's own answers are learnt from, in place of the references."""


def recipes() -> Iterator[Recipe]:
    """Yield every recipe behind those it needs."""
    yield Recipe(name="ar", about="AR SFT", start=BASE, objective={"kind": "ar"}, passes=PASS)
    yield Recipe(name="ar-longer", about="AR SFT with MARS's compute", objective={"kind": "ar"}, passes=HALF * COST)
    for block in BLOCKS:
        yield Recipe(name=f"mars-{block}", about=f"MARS, B = {block}, as in the paper", objective=_mars(block))
    for block in BLOCKS:
        yield Recipe(
            name=f"mask-only-{block}",
            about=f"MARS without the AR loss, B = {block}",
            objective=_mars(block, ar_weight=0),
        )
    yield Recipe(name="diffusion-4", about="block diffusion, B = 4", kind="diffusion", objective={"block": 4})
    yield Recipe(name="medusa", about="Medusa heads on the AR model", kind="medusa", objective={"heads": 7})
    yield Recipe(
        name="draft-ar",
        about="a draft of a twentieth of the size, AR from random weights, for longer",
        start=DRAFT,
        objective={"kind": "ar"},
        passes=8 * PASS,
        learning_rate=3e-3,
    )
    yield Recipe(name="draft-mars-4", about="the same draft, MARS, B = 4", start="draft-ar", objective=_mars(4))
    yield from _beyond()


def _beyond() -> Iterator[Recipe]:
    """What the paper does not try: each differs in one thing from `mars-8`, the last ones from `mars-16`."""
    yield Recipe(name="random-8", about="random block phase, B = 8", objective=_mars(8, phase="random"))
    yield Recipe(
        name="share-8", about="half of the masks, the other tokens shown, B = 8", objective=_mars(8, mask_share=0.5)
    )
    yield Recipe(
        name="guesses-8",
        about="own guesses left visible at the beginning of blocks, B = 8",
        objective=_mars(8, guesses=True),
        passes=HALF * 0.75,  # it takes a third forward
    )
    yield Recipe(name="decay-8", about="a mask weighs 0.8 of the one before it, B = 8", objective=_mars(8, decay=0.8))
    yield Recipe(
        name="distill-8", about="the clean stream teaches the noisy one, B = 8", objective=_mars(8, distill=1.0)
    )
    yield Recipe(
        name="own-8",
        about="targets are the AR model's own answers, B = 8",
        objective=_mars(8),
        passes=PASS,  # there are so many answers as half a pass takes
        answers_of="ar",
    )
    yield Recipe(
        name="direct-16",
        about="MARS with the compute of both, no AR stage, B = 16",
        start=BASE,
        objective=_mars(16),
        passes=PASS / COST + HALF,
    )
    yield Recipe(name="mars-32", about="MARS, B = 32, as in the paper otherwise", objective=_mars(32))
    yield Recipe(
        name="best",
        about="no AR stage, B = 32, random phase, the clean stream teaches",
        start=BASE,
        objective=_mars(32, phase="random", distill=1.0),
        passes=PASS / COST + HALF,
    )


def _mars(block: int, **other: Any) -> dict[str, Any]:
    return {"kind": "mars", "block": block, "phase": "absolute"} | other
