"""Print a comparison with other engines as a table, and return it for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.comparison import ANSWER_TOKENS, PeerBatch, PeerComparison, PeerSample
from benchmarks.peers.prompts import PROMPT_TOKENS
from mars_ray.measure import Spread, speedup, spread, throughput


def show(model: str, threads: int, comparison: PeerComparison) -> None:
    """Print a table of all batches, and a line for each engine that did not run."""
    table = Table(
        title=f"{model}: {PROMPT_TOKENS} tokens read, {ANSWER_TOKENS} generated, {threads} threads",
        caption="tokens/s of decoding and of reading prompts, median and range; 'ours' is the speed divided by ours",
    )
    for column in ("batch", "engine", "tokens/s", "range", "ours", "prompt tokens/s", "range", "same tokens", "load s"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for batch in comparison.batches:
        for name in comparison.bits:
            table.add_row(*_cells(comparison, batch, name), end_section=name == list(comparison.bits)[-1])
    console = Console(width=120)
    console.print(table)
    for name, reason in comparison.absent.items():
        console.print(f"{name}: {reason}", markup=False, highlight=False, soft_wrap=True)


def ours_like(name: str, bits: dict[str, int]) -> str:
    """Return our format to compare `name` with: the one of as many bits, otherwise the one of the most bits."""
    ours = [engine for engine in bits if engine.startswith("mars-ray")]
    return next((engine for engine in ours if bits[engine] == bits[name]), ours[0])


def report(model: str, threads: int, comparison: PeerComparison) -> dict[str, Any]:
    """Return everything measured, ready for JSON."""
    batches = [
        {
            "batch": batch.batch,
            "engines": {
                name: {
                    "bits": comparison.bits[name],
                    "load_seconds": comparison.load_seconds[name],
                    "tokens_per_s": asdict(throughput(samples)),
                    "prompt_tokens_per_s": asdict(prompt_rate(samples)),
                    "times_ours": asdict(speedup(samples, batch.samples[ours_like(name, comparison.bits)])),
                    "compared_with": ours_like(name, comparison.bits),
                    "same_tokens": batch.same[name],
                    "samples": [asdict(sample) for sample in samples],
                }
                for name, samples in batch.samples.items()
            },
        }
        for batch in comparison.batches
    ]
    lengths = {"prompt_tokens": PROMPT_TOKENS, "answer_tokens": ANSWER_TOKENS}
    return {"model": model, "threads": threads, **lengths, "absent": comparison.absent, "batches": batches}


def prompt_rate(samples: Sequence[PeerSample]) -> Spread:
    """Return the spread of the prompt tokens read per second."""
    return spread([sample.prompt_tokens / sample.prompt_seconds for sample in samples])


def _cells(comparison: PeerComparison, batch: PeerBatch, name: str) -> tuple[str, ...]:
    samples = batch.samples[name]
    decode_rate = throughput(samples)
    prefill_rate = prompt_rate(samples)
    against = ours_like(name, comparison.bits)
    times = "" if name == against else f"{speedup(samples, batch.samples[against]).median:.2f}"
    return (
        str(batch.batch),
        name,
        f"{decode_rate.median:,.0f}",
        f"{decode_rate.min:,.0f}-{decode_rate.max:,.0f}",
        times,
        f"{prefill_rate.median:,.0f}",
        f"{prefill_rate.min:,.0f}-{prefill_rate.max:,.0f}",
        f"{batch.same[name]:.0%}",
        f"{comparison.load_seconds[name]:.1f}",
    )
