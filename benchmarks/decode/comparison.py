"""Run every decoder on the same requests, in turns, at several batch sizes; print and report the speeds."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decode.contenders import THRESHOLD, Subject, contenders, subject
from mars_ray.errors import ConfigError
from mars_ray.measure import Sample, Spread, interleaved, speedup, throughput
from mars_ray.model.dtype import DtypeOrAuto, ResolvedDtype
from mars_ray.progress import ProgressLine

OURS = f"threshold {THRESHOLD}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The speed of `one` divided by that of `other`, computed within each round."""

    one: str
    other: str
    times: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The results of all decoders at one batch size."""

    batch: int
    dtype: ResolvedDtype
    samples: dict[str, list[Sample]]
    absent: dict[str, str]
    ratios: list[Ratio]


def compare_decoders(
    name: str, batches: Sequence[int], requests: int, repeats: int, dtype: DtypeOrAuto
) -> list[BatchResult]:
    """Measure and print. Raises an `InputError` for an unusable model or number."""
    for what, value in (*(("batch", batch) for batch in batches), ("requests", requests), ("repeats", repeats)):
        if value < 1:
            raise ConfigError(f"{what} is {value}; it must be at least 1.")
    torch.set_num_threads(1)
    case = subject(name, requests, dtype)
    results = []
    for batch in batches:
        candidates, absent = contenders(case, batch)
        with ProgressLine(f"batch {batch}", total=len(candidates) * (repeats + 1)) as progress:
            samples = interleaved(candidates, repeats, progress)
        compared = ratios(samples)
        results.append(BatchResult(batch=batch, dtype=case.dtype, samples=samples, absent=absent, ratios=compared))
        show(case, results[-1])
    return results


def tokens_per_forward(samples: Sequence[Sample]) -> float:
    """Return the mean over the rounds."""
    return sum(sample.tokens for sample in samples) / sum(sample.forwards for sample in samples)


def ratios(samples: Mapping[str, list[Sample]]) -> list[Ratio]:
    """Return the ratios of interest; of the paper's caches only the fastest is compared."""
    caches = [name for name in samples if name.startswith("block cache")]
    best = max(caches, key=lambda name: median(sample.tokens_per_s for sample in samples[name]))
    pairs = [
        ("ar", "generate"),
        ("ar", "generate_batch"),
        (OURS, "ar"),
        ("exact", "ar"),
        (OURS, best),
        (OURS, "generate"),
    ]
    compared = [
        Ratio(one=one, other=other, times=speedup(samples[one], samples[other]))
        for one, other in pairs
        if one in samples and other in samples
    ]
    ahead, plain = ([sample.decoding for sample in samples[name] if sample.decoding] for name in (OURS, "ar"))
    if ahead and plain:
        compared.append(Ratio(one=f"{OURS}, decoding", other="ar, decoding", times=speedup(ahead, plain)))
    return compared


def show(case: Subject, result: BatchResult) -> None:
    """Print the results at one batch size."""
    work = case.workload
    title = f"{case.name}, {case.dtype.name}, batch {result.batch}: "
    title += f"{len(work.prompts)} requests, {work.tokens} tokens, one thread\n{case.dtype.name}: {case.dtype.reason}"
    if case.scripts:
        title += "\nrandom weights; proposals are replayed from the bundled model"
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
    for column in ("compared", "times", "range"):
        compared.add_column(column, justify="left" if column == "compared" else "right")
    for ratio in result.ratios:
        times = ratio.times
        compared.add_row(
            f"{ratio.one} : {ratio.other}",
            f"{times.median:.2f}",
            f"{times.min:.2f}-{times.max:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(compared)


def report(name: str, results: Sequence[BatchResult]) -> dict[str, Any]:
    """Return everything measured, ready for JSON; `results` must not be empty."""
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
            "ratios": [asdict(ratio) for ratio in result.ratios],
        }
        for result in results
    ]
    settings = {"model": name, "dtype": dtype.name, "dtype_reason": dtype.reason, "threads": 1}
    return {**settings, "batches": batches}
