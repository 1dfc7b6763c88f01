"""Compute the time of a step on a machine from its data sheet and the shape of a network."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepModel:
    """A network on a machine."""

    name: str
    """Name in reports, such as `h200/qwen2.5-7b`: printable ASCII characters."""
    weights_bytes: float
    kv_bytes_per_token: float
    bandwidth: float
    """Bytes per second that the memory delivers."""
    rate: float
    """Operations per second."""
    flops_per_token: float
    """Operations that a position takes."""
    efficiency: float
    """Share of bandwidth and rate that steps reach, 0 to 1."""
    overhead_s: float
    """Seconds added to each step."""

    def seconds(self, *, num_seqs: int, positions: int, kv_tokens: int, prompt_tokens: int) -> float:
        """Return the time of a step.

        `positions` are the tokens, drafts and masks of the `num_seqs` sequences that decode. `kv_tokens` are the tokens
        in the cache that all sequences attend to, and `prompt_tokens` the prompt tokens read by other sequences.
        """
        del num_seqs  # sequences cost only their positions and their cache
        bytes_read = self.weights_bytes + self.kv_bytes_per_token * kv_tokens
        operations = self.flops_per_token * (positions + prompt_tokens)
        return max(bytes_read / self.bandwidth, operations / self.rate) / self.efficiency + self.overhead_s
