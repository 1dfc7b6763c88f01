"""Compare the speed of candidates in interleaved runs, and describe the machine."""

import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, stdev
from typing import TypeVar

import psutil
import torch
import transformers

from mars_ray.progress import ProgressLine
from mars_ray.usable_cpus import usable_cpus

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed run."""

    tokens: int
    seconds: float
    forwards: int
    decoding: "Sample | None" = None
    """The same run without the first step of each answer, which processes the prompt. None if not measured."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of finished answers per second."""
        return self.tokens / self.seconds


SampleT = TypeVar("SampleT", bound=Sample)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    min: float
    max: float


def interleaved(
    candidates: Mapping[str, Callable[[], SampleT]], repeats: int, progress: ProgressLine
) -> dict[str, list[SampleT]]:
    """Run every candidate once per round, and return `repeats` samples of each candidate.

    An extra first round is a warm-up. Round r begins with candidate r mod n, so the order changes between rounds.
    """
    names = list(candidates)
    samples: dict[str, list[SampleT]] = {name: [] for name in names}
    total = (repeats + 1) * len(names)
    for turn in range(total):
        number, position = divmod(turn, len(names))
        name = names[(number + position) % len(names)]
        sample = candidates[name]()
        if number > 0:
            samples[name].append(sample)
        progress.update(turn + 1, {"round": f"{number}/{repeats}", name: f"{sample.tokens_per_s:.0f} tokens/s"})
    return samples


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the range of one or more values."""
    return Spread(median(values), min(values), max(values))


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of one or more values; that of one value is 0."""
    return stdev(values) if len(values) > 1 else 0.0


def throughput(samples: Sequence[Sample]) -> Spread:
    """Return the spread of the tokens per second."""
    return spread([sample.tokens_per_s for sample in samples])


def speedup(samples: Sequence[Sample], baseline: Sequence[Sample]) -> Spread:
    """Return the spread of the speedup over the baseline, computed round by round."""
    return spread([run.tokens_per_s / base.tokens_per_s for run, base in zip(samples, baseline, strict=True)])


def machine() -> dict[str, str | int | float | bool | None]:
    """Return the processor, memory, GPU, library versions, threads and commit, without names of hosts or users."""
    cuda = torch.cuda.is_available()
    commit = _git("rev-parse", "HEAD")
    return {
        "cpu": _cpu_model(CPUINFO.read_text() if CPUINFO.exists() else ""),
        "cores": usable_cpus(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
        "uncommitted_changes": None if commit is None else bool(_git("status", "--porcelain")),
    }


def _cpu_model(cpuinfo: str) -> str:
    names = (line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name"))
    return next(names, platform.machine())


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in the folder of this package, or None outside a checkout."""
    git = shutil.which("git")
    if git is None:
        return None
    process = subprocess.run(
        [git, *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=10
    )
    return process.stdout.strip() if process.returncode == 0 else None
