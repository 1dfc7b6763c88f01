"""The interface of model runners, which run the forwards of an engine, and the output of a forward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.engine.kv.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class MaskRow:
    """A row of masks in a forward, as indices into the picks of the forward."""

    behind: int
    """Index of the pick at the token or draft before the row."""
    masks: range
    """Indices of the picks at the masks."""


@dataclass(frozen=True, slots=True)
class Picks:
    """The positions of one sequence whose logits a forward reads, as indices into the picks of the forward."""

    before: range
    """Tokens before the last one, read for an audit or for the log-probabilities of a prompt."""
    verifying: range = range(0)
    """The last token and each draft. Empty for a part of a prompt that stops short of the prompt's end."""
    masks: tuple[range, ...] = ()
    """The row of masks after the last token, and after each draft."""

    @property
    def rows(self) -> list[MaskRow]:
        """The rows that have masks."""
        return [MaskRow(behind, row) for behind, row in zip(self.verifying, self.masks, strict=True) if row]


@dataclass(slots=True)
class ForwardOutput:
    """The output of a forward at the M picked positions. The mask token has probability 0 everywhere."""

    tokens: list[int]
    """Most likely token at each position."""
    confidences: list[float]
    """Probability of the most likely token at each position."""
    logits_MV: Tensor
    """Logits in float32."""
    hidden_MH: Tensor | None
    """Last hidden states, from which the logits are computed; None if no adapter reads them."""


class MaskCorrector(Protocol):
    """The sampler head of an adapter."""

    def correct(self, output: ForwardOutput, rows: Sequence[MaskRow]) -> None:
        """Correct the tokens, confidences and logits of `output` at the masks of `rows`, in place."""


class PackedAdapter(Protocol):
    """An adapter in the form that a runner computes with."""

    @property
    def sampler(self) -> MaskCorrector:
        """The sampler head of the adapter."""

    @property
    def nbytes(self) -> int:
        """Memory of the adapter in bytes."""


class ModelRunner(Protocol):
    """Runs the forwards of a network over the KV cache."""

    def pack(self, lora: GatedLoRA) -> PackedAdapter:
        """Return an adapter in the form that `use` takes. Any thread may call it, one at a time, next to a forward.

        Raises `AdapterError` if the adapter does not fit the network.
        """

    def use(self, adapters: Sequence[Any]) -> None:
        """Decode masks with these adapters, which this runner has packed, from the next forward on.

        Batches refer to them by their index.
        """

    def run(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one forward, which writes the keys and values of all its positions to the cache."""

    def close(self) -> None:
        """Remove all adapters from the network."""
