"""Memory of a training worker with activation checkpointing, by arithmetic, for the table of docs/train.md.

All figures are bytes. A worker holds weights, gradients and two moments of AdamW in float32, 16 bytes a number. While
it computes, it holds more: gathered weights and their gradients, and activations.
"""

from dataclasses import dataclass

MASTERS = 16
"""Bytes of a trained number: float32 weight, gradient and two moments."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a Qwen2 decoder."""

    hidden: int
    layers: int
    inner: int
    heads: int
    key_heads: int
    head_size: int = 128
    vocabulary: int = 152064
    tied: bool = False

    @property
    def layer(self) -> int:
        """Numbers in one layer."""
        queries = self.heads * self.head_size
        keys = self.key_heads * self.head_size
        attention = self.hidden * (2 * queries + 2 * keys) + queries + 2 * keys
        return attention + 3 * self.hidden * self.inner + 2 * self.hidden

    @property
    def rest(self) -> int:
        """Numbers outside the layers: embeddings and the final norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def numbers(self) -> int:
        """Numbers in the network."""
        return self.layers * self.layer + self.rest


QWEN = {
    "0.5 B": Shape(
        hidden=896, layers=24, inner=4864, heads=14, key_heads=2, head_size=64, vocabulary=151936, tied=True
    ),
    "1.5 B": Shape(hidden=1536, layers=28, inner=8960, heads=12, key_heads=2, vocabulary=151936, tied=True),
    "3 B": Shape(hidden=2048, layers=36, inner=11008, heads=16, key_heads=2, vocabulary=151936, tied=True),
    "7 B": Shape(hidden=3584, layers=28, inner=18944, heads=28, key_heads=4),
    "14 B": Shape(hidden=5120, layers=48, inner=13824, heads=40, key_heads=8),
    "32 B": Shape(hidden=5120, layers=64, inner=27648, heads=40, key_heads=8),
}
"""Networks of the table, which are those of Qwen2.5."""


def activations(shape: Shape, slots: int, number: int) -> int:
    """Return the memory of a forward's activations, and of the logits and their gradient if all slots have labels.

    The inputs of all layers are kept; one layer is computed again in the backward and has all its activations.

    `number` is the size of a number in the forward: 2 in bfloat16, 4 in float32.
    """
    queries = shape.heads * shape.head_size
    keys = shape.key_heads * shape.head_size
    # Two norms keep their input in float32 and their output twice; attention keeps queries, keys, values and its
    # output; the gated layer keeps four values of its inner size.
    layer = 2 * 4 * shape.hidden + number * (4 * shape.hidden + 2 * queries + 2 * keys + 4 * shape.inner)
    return slots * (shape.layers * number * shape.hidden + layer + 2 * number * shape.vocabulary)


def whole(shape: Shape, slots: int, number: int = 2) -> int:
    """Return the peak of a worker that holds all weights. DDP copies gradients to buckets; autocast copies weights to
    bfloat16."""
    copies = 4 + (2 if number == 2 else 0)
    return (MASTERS + copies) * shape.numbers + activations(shape, slots, number)


def sharded(shape: Shape, workers: int, slots: int, number: int = 2) -> int:
    """Return the peak of a worker that holds shards.

    The backward of the first layer that is computed: two layers are gathered, one has gradients and their float32 copy,
    which is summed over the workers. The weights outside of layers are gathered and have gradients. These are summed at
    the end, when the activations are free.
    """
    layer = (3 * number + 4) * shape.layer
    amid = layer + activations(shape, slots, number)
    end = (4 + 4 / workers) * shape.rest
    return int(MASTERS * shape.numbers / workers + 2 * number * shape.rest + max(amid, end))
