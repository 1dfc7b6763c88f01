"""What a comparison with other engines found: the table, and all of it for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.comparison import ANSWER_TOKENS, PeerBatch, PeerComparison, PeerSample
from benchmarks.peers.prompts import PROMPT_TOKENS
from mars_ray.measure import Spread, machine, speedup, spread, throughput


def show(model: str, threads: int, found: PeerComparison) -> None:
    """Print a table of all batches, and a line for each engine that did not run."""
    table = Table(
        title=f"{model}: {PROMPT_TOKENS} tokens read, {ANSWER_TOKENS} given, {threads} threads",
        caption="tokens/s of decoding and of reading prompts, median and range; 'ours' is how many times as fast as we",
    )
    for column in ("batch", "engine", "tokens/s", "range", "ours", "prompt tokens/s", "range", "same tokens"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for batch in found.batches:
        for name in found.bits:
            table.add_row(*_cells(found, batch, name), end_section=name == list(found.bits)[-1])
    console = Console(width=120)
    console.print(table)
    for name, reason in found.absent.items():
        console.print(f"{name}: {reason}", markup=False, highlight=False, soft_wrap=True)


def ours_like(name: str, bits: dict[str, int]) -> str:
    """Return which of our settings `name` is compared with: that of as many bits, or else of the most."""
    ours = [each for each in bits if each.startswith("mars-ray")]
    return next((each for each in ours if bits[each] == bits[name]), ours[0])


def report(model: str, threads: int, found: PeerComparison, command: str) -> dict[str, Any]:
    """Return everything measured, ready for JSON."""
    batches = [
        {
            "batch": batch.batch,
            "engines": {
                name: {
                    "bits": found.bits[name],
                    "tokens_per_s": asdict(throughput(samples)),
                    "prompt_tokens_per_s": asdict(prompt_rate(samples)),
                    "times_ours": asdict(speedup(samples, batch.samples[ours_like(name, found.bits)])),
                    "compared_with": ours_like(name, found.bits),
                    "same_tokens": batch.same[name],
                    "samples": [asdict(sample) for sample in samples],
                }
                for name, samples in batch.samples.items()
            },
        }
        for batch in found.batches
    ]
    lengths = {"prompt_tokens": PROMPT_TOKENS, "answer_tokens": ANSWER_TOKENS}
    return {
        "command": command,
        "machine": machine(),
        "model": model,
        "threads": threads,
        **lengths,
        "absent": found.absent,
        "batches": batches,
    }


def prompt_rate(samples: Sequence[PeerSample]) -> Spread:
    """Return the spread of the tokens of prompts that were read in a second."""
    return spread([sample.prompt_tokens / sample.prompt_seconds for sample in samples])


def _cells(found: PeerComparison, batch: PeerBatch, name: str) -> tuple[str, ...]:
    samples = batch.samples[name]
    rate, read = throughput(samples), prompt_rate(samples)
    against = ours_like(name, found.bits)
    times = "" if name == against else f"{speedup(samples, batch.samples[against]).median:.2f}"
    return (
        str(batch.batch),
        name,
        f"{rate.median:,.0f}",
        f"{rate.min:,.0f}-{rate.max:,.0f}",
        times,
        f"{read.median:,.0f}",
        f"{read.min:,.0f}-{read.max:,.0f}",
        f"{batch.same[name]:.0%}",
    )
