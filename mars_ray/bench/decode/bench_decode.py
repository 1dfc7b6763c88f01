"""`mars-ray bench decode`: every decoder on the same requests, in turns, batch by batch.

The report has every sample, the targets and the machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mars_ray.bench.decode.contenders import THRESHOLD, Subject, contenders, subject
from mars_ray.bench.machine import machine
from mars_ray.bench.measure import Sample, Spread, interleaved, speedup, throughput
from mars_ray.errors import ConfigError
from mars_ray.model.dtype import DtypeOrAuto, ResolvedDtype
from mars_ray.progress import ProgressLine

OURS = f"threshold {THRESHOLD}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One claim: how much faster `one` is than `other`, each ratio within one round."""

    one: str
    other: str
    times: Spread
    asked: float | None
    """What the project set itself; None where nothing was asked."""

    @property
    def met(self) -> bool | None:
        """Whether the median reaches what was asked."""
        return None if self.asked is None else self.times.median >= self.asked


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The results of all decoders at one batch size."""

    batch: int
    dtype: ResolvedDtype
    samples: dict[str, list[Sample]]
    absent: dict[str, str]
    ratios: list[Ratio]


def bench_decode(
    name: str, batches: Sequence[int], requests: int, repeats: int, dtype: DtypeOrAuto
) -> list[BatchResult]:
    """Measure and print. Raises an `InputError` for a model or a number that cannot be used."""
    for what, value in (*(("batch", batch) for batch in batches), ("requests", requests), ("repeats", repeats)):
        if value < 1:
            raise ConfigError(f"{what} is {value}; it must be at least 1.")
    torch.set_num_threads(1)
    on = subject(name, requests, dtype)
    results = []
    for batch in batches:
        candidates, absent = contenders(on, batch)
        with ProgressLine(f"batch {batch}", total=len(candidates) * (repeats + 1)) as progress:
            samples = interleaved(candidates, repeats, progress)
        compared = ratios(on, batch, samples)
        results.append(BatchResult(batch=batch, dtype=on.dtype, samples=samples, absent=absent, ratios=compared))
        show(on, results[-1])
    return results


def tokens_per_forward(samples: Sequence[Sample]) -> float:
    """Return the mean over the rounds."""
    return sum(sample.tokens for sample in samples) / sum(sample.forwards for sample in samples)


def ratios(on: Subject, batch: int, samples: Mapping[str, list[Sample]]) -> list[Ratio]:
    """Return the comparisons that matter at `batch`, with what was asked of them."""
    caches = [name for name in samples if name.startswith("block cache")]
    best = max(caches, key=lambda name: median(sample.tokens_per_s for sample in samples[name]))
    bundled = on.name == "bundled"
    alone = 0.6 if bundled else 0.75
    asked: dict[tuple[str, str], float | None] = {
        ("ar", "generate"): {1: 2.0, 16: 1.5}.get(batch) if bundled else None,
        ("ar, eager", "generate"): 1.0 if bundled and batch == 1 else None,
        ("ar", "generate_batch"): 1.2 if bundled and batch == 16 else None,
        (OURS, "ar"): alone * tokens_per_forward(samples[OURS]) if batch == 1 else 1.0,
        ("exact", "ar"): 1.5 if batch == 1 else 1.0,
        (OURS, best): {4: 1.2, 16: 1.5}.get(batch),
        (OURS, "generate"): None,
    }
    found = [
        Ratio(one=one, other=other, times=speedup(samples[one], samples[other]), asked=least)
        for (one, other), least in asked.items()
        if one in samples and other in samples
    ]
    ahead, plain = ([each.decoding for each in samples[name] if each.decoding] for name in (OURS, "ar"))
    if ahead and plain:
        least = alone * tokens_per_forward(ahead)
        found.append(Ratio(one=f"{OURS}, decoding", other="ar, decoding", times=speedup(ahead, plain), asked=least))
    return found


def show(on: Subject, result: BatchResult) -> None:
    """Print one batch."""
    work = on.workload
    title = f"{on.name}, {on.dtype.name}, batch {result.batch}: "
    title += f"{len(work.prompts)} requests, {work.tokens} tokens, one thread\n{on.dtype.name}: {on.dtype.reason}"
    if on.scripts:
        title += "\nrandom weights; what they accept is replayed from the bundled model"
    table = Table(title=title)
    for column in ("decoder", "tokens/s", "range", "tokens per forward"):
        table.add_column(column, justify="left" if column == "decoder" else "right")
    for name, samples in result.samples.items():
        rate = throughput(samples)
        table.add_row(
            name, f"{rate.median:,.0f}", f"{rate.min:,.0f}-{rate.max:,.0f}", f"{tokens_per_forward(samples):.2f}"
        )
    for name, reason in result.absent.items():
        table.add_row(name, "-", reason, "-")
    compared = Table()
    for column in ("compared", "times", "range", "asked", ""):
        compared.add_column(column, justify="left" if column == "compared" else "right")
    for ratio in result.ratios:
        times = ratio.times
        compared.add_row(
            f"{ratio.one} : {ratio.other}",
            f"{times.median:.2f}",
            f"{times.min:.2f}-{times.max:.2f}",
            "" if ratio.asked is None else f"{ratio.asked:.2f}",
            {None: "", True: "met", False: "missed"}[ratio.met],
        )
    console = Console()
    console.print(table)
    console.print(compared)


def report(name: str, results: Sequence[BatchResult], command: str) -> dict[str, Any]:
    """Return everything measured, ready for JSON; there is one result at least."""
    dtype = results[0].dtype
    batches = [
        {
            "batch": result.batch,
            "decoders": {
                decoder: {
                    "tokens_per_s": asdict(throughput(samples)),
                    "tokens_per_forward": tokens_per_forward(samples),
                    "samples": [asdict(sample) for sample in samples],
                }
                for decoder, samples in result.samples.items()
            },
            "absent": result.absent,
            "ratios": [asdict(ratio) | {"met": ratio.met} for ratio in result.ratios],
        }
        for result in results
    ]
    of_run = {"model": name, "dtype": dtype.name, "dtype_reason": dtype.reason, "threads": 1}
    return {"command": command, "machine": machine(), **of_run, "batches": batches}
