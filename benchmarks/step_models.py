"""Compare the modelled step times with published figures.

    python -m benchmarks.step_models --json step_models.json

The published figures are those of other people on GPUs; nothing is measured here.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import brentq

from mars_ray.cli.shared import write_json
from mars_ray.machines.registry import step_model
from mars_ray.machines.step_model import PAPER_BLOCK, PAPER_CURVE, StepModel
from mars_ray.program import run_program

PAPER_WITHIN = 0.15
"""Largest deviation from the paper's figures that counts as agreement."""
VLLM_WITHIN = 0.25
"""Largest deviation from figures of vLLM that counts as agreement."""
GSM8K_TOKENS = 200
"""Assumed mean tokens of the cache of a sequence in the paper's runs: a short prompt and half of an answer."""
CHAT_PROMPT = 200
CHAT_OUTPUT = 200
"""Assumed tokens of "short chats"."""

PAPER_AR = {4: 143.4, 8: 236.7, 16: 434.3}
PAPER_MARS = {
    8: {4: 196.0, 8: 289.9, 16: 484.1},
    16: {4: 228.5, 8: 338.0, 16: 566.0},
    32: {4: 241.9, 8: 368.4, 16: 544.9},
    64: {4: 239.5, 8: 342.6, 16: 383.8},
}
"""Published tokens/s at threshold 0.95, by cache block and batch."""
L4_ITL_MS = {1: 5.1, 2: 5.2, 4: 5.3, 8: 5.5, 16: 6.0, 32: 7.1}
L4_TOKENS_PER_S = {1: 168.0, 2: 367.0, 4: 698.0, 8: 1312.0, 16: 2277.0, 32: 3773.0}
H100_TPOT_MS = {1: 6.48, 4: 6.59, 16: 10.94}
H100_TOKENS_PER_S = {1: 122.0, 4: 580.0, 16: 1384.0}
A100_TOKENS_PER_S = 75.0
A100_GAIN_AT_8 = 6.6


class Comparison(NamedTuple):
    """A published figure and the modelled one."""

    source: str
    figure: str
    published: float
    modelled: float
    within: float
    """Deviation that counts as agreement."""

    @property
    def deviation(self) -> float:
        """Modelled figure relative to the published one, minus 1."""
        return self.modelled / self.published - 1

    @property
    def agrees(self) -> bool:
        """True if the deviation is small enough."""
        return abs(self.deviation) <= self.within


def compare() -> list[Comparison]:
    """Return all comparisons."""
    return [*_paper(), *_vllm()]


def _paper() -> Iterator[Comparison]:
    source = "the paper, H200, Qwen2.5-7B, GSM8K"
    model = step_model("h200/qwen2.5-7b/paper")
    for batch, published in PAPER_AR.items():
        modelled = batch / _decode_s(model, batch, GSM8K_TOKENS)
        yield Comparison(source, f"AR tokens/s at batch {batch}", published, modelled, PAPER_WITHIN)
    for cache_block, by_batch in PAPER_MARS.items():
        for batch, published in by_batch.items():
            modelled = block_cache_tokens_per_s(model, batch, cache_block)
            figure = f"MARS tokens/s, cache block {cache_block}, batch {batch}"
            yield Comparison(source, figure, published, modelled, PAPER_WITHIN)


def _vllm() -> Iterator[Comparison]:
    source = "vLLM 0.23, L4, Qwen2.5-0.5B, 256 in, 128 out"
    l4 = step_model("l4/qwen2.5-0.5b")
    for callers, published in L4_ITL_MS.items():
        modelled = 1000 * _decode_s(l4, callers, 256 + 128 // 2)
        yield Comparison(source, f"ITL in ms, {callers} callers", published, modelled, VLLM_WITHIN)
    for callers, published in L4_TOKENS_PER_S.items():
        modelled = _served_tokens_per_s(l4, callers, 256, 128)
        yield Comparison(source, f"tokens/s, {callers} callers", published, modelled, VLLM_WITHIN)
    source = "vLLM 0.21, H100, Llama-3.1-8B, short chats"
    h100 = step_model("h100/llama-3.1-8b")
    for callers, published in H100_TPOT_MS.items():
        modelled = 1000 * _decode_s(h100, callers, CHAT_PROMPT + CHAT_OUTPUT // 2)
        yield Comparison(source, f"TPOT in ms, {callers} callers", published, modelled, VLLM_WITHIN)
    for callers, published in H100_TOKENS_PER_S.items():
        modelled = _served_tokens_per_s(h100, callers, CHAT_PROMPT, CHAT_OUTPUT)
        yield Comparison(source, f"tokens/s, {callers} callers", published, modelled, VLLM_WITHIN)
    source = "vLLM 0.23, A100-40G, Llama-3.1-8B, 1,024 in, 128 out"
    a100 = step_model("a100-40g/llama-3.1-8b")
    alone = _served_tokens_per_s(a100, 1, 1024, 128)
    yield Comparison(source, "tokens/s, 1 caller", A100_TOKENS_PER_S, alone, VLLM_WITHIN)
    gain = _served_tokens_per_s(a100, 8, 1024, 128) / alone
    yield Comparison(source, "gain of 8 callers over 1", A100_GAIN_AT_8, gain, VLLM_WITHIN)


def _decode_s(model: StepModel, seqs: int, tokens_per_seq: int, prompt_tokens: int = 0) -> float:
    """Return the time of a step in which each sequence decodes one token."""
    kv_tokens = seqs * tokens_per_seq
    return model.seconds(num_seqs=seqs, positions=seqs, kv_tokens=kv_tokens, prompt_tokens=prompt_tokens)


def _served_tokens_per_s(model: StepModel, callers: int, prompt: int, output: int) -> float:
    """Return the throughput of callers in a closed loop. Each request reads its prompt in one step."""
    tokens_per_seq = prompt + output // 2
    step_s = _decode_s(model, callers, tokens_per_seq)
    reading_s = _decode_s(model, callers, tokens_per_seq, prompt) - step_s
    return callers * output / (output * step_s + callers * reading_s)


def block_cache_tokens_per_s(model: StepModel, batch: int, cache_block: int, threshold: float = 0.95) -> float:
    """Return the throughput of the paper's batch decoder.

    All sequences of a batch fill a block of `cache_block` tokens, and wait for the slowest. A forward feeds the tokens
    of the block so far, half of the block on average, and the masks.
    """
    tokens = next(point.tokens_per_forward for point in PAPER_CURVE if point.threshold == threshold)
    forwards = forwards_of_the_slowest(tokens, batch, cache_block)
    masks = PAPER_BLOCK - 1
    step_s = model.seconds(
        num_seqs=batch,
        positions=round(batch * (cache_block / 2 + masks)),
        kv_tokens=batch * GSM8K_TOKENS,
        prompt_tokens=0,
    )
    return batch * cache_block / (forwards * step_s)


def forwards_of_the_slowest(tokens_per_forward: float, batch: int, cache_block: int) -> float:
    """Return the expected forwards until each of `batch` sequences has `cache_block` tokens.

    A mask is accepted with the same probability each time, independently, as long as those before it are.
    """
    masks_K = np.arange(1, PAPER_BLOCK)
    share = brentq(lambda part: float((part**masks_K).sum()) - (tokens_per_forward - 1), 0.0, 1.0)
    accepted_B = share ** np.arange(PAPER_BLOCK) * np.append(np.full(PAPER_BLOCK - 1, 1 - share), 1.0)
    left_T: NDArray[np.float64] = np.zeros(cache_block + 1)
    left_T[0] = 1.0  # probability of the tokens so far
    expected = 0.0
    while (unfinished := 1 - left_T[cache_block]) > 1e-12:
        expected += 1 - (1 - unfinished) ** batch
        after_T = np.zeros_like(left_T)
        after_T[cache_block] = left_T[cache_block]
        for tokens in range(cache_block):
            for gained, probability in enumerate(accepted_B, start=1):
                after_T[min(tokens + gained, cache_block)] += left_T[tokens] * probability
        left_T = after_T
    return expected


def main() -> None:
    """Print the comparisons and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    comparisons = compare()
    table = Table(title="Published figures and the model")
    for column in ("source", "figure", "published", "modelled", "deviation", "within"):
        table.add_column(column, justify="left" if column in ("source", "figure") else "right")
    for row in comparisons:
        limit = f"{row.within:.0%}" if row.agrees else f"not {row.within:.0%}"
        table.add_row(
            row.source, row.figure, f"{row.published:g}", f"{row.modelled:.4g}", f"{row.deviation:+.0%}", limit
        )
    Console(width=140).print(table)
    rows = [{**row._asdict(), "deviation": row.deviation, "agrees": row.agrees} for row in comparisons]
    write_json(arguments.json, {"comparisons": rows})


if __name__ == "__main__":
    run_program("benchmarks.step_models", main)
