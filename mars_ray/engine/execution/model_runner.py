"""What runs one forward after the other: the engine needs no more of it than this."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mars_ray.engine.kv.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class MaskRow:
    """A row of masks: the pick of the token or draft it stands behind, and the picks of the masks."""

    behind: int
    masks: range


@dataclass(slots=True)
class ForwardOutput:
    """What a forward gave at the M picked positions. The mask token has probability 0 at each."""

    tokens: list[int]
    """The most likely token at each position."""
    confidences: list[float]
    """The probability of that token."""
    logits_MV: Tensor
    """Logits in float32."""
    hidden_MH: Tensor | None
    """The last hidden states, which the logits are made from; None where no adapter reads them."""


class MaskCorrector(Protocol):
    """The sampler head of an adapter."""

    def correct(self, output: ForwardOutput, rows: Sequence[MaskRow]) -> None:
        """Correct tokens, confidences and logits of `output` at the masks of `rows`, in place."""


class ModelRunner(Protocol):
    """Runs a network over the KV cache, on one batch after the other."""

    @property
    def mask_samplers(self) -> Sequence[MaskCorrector]:
        """The sampler head of each adapter."""

    def run(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one forward; the keys and values of all its positions are in the cache afterwards."""

    def wait_until_compiled(self) -> None:
        """Wait until the steps that can be compiled are; return at once where nothing is compiled."""

    def close(self) -> None:
        """End what runs in the background."""
