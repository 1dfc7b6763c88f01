"""Timed comparisons of candidates in turns, and a description of the machine they ran on."""

import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import psutil
import torch
import transformers

from mars_ray.progress import ProgressLine
from mars_ray.usable_cpus import usable_cpus

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The work done once."""

    tokens: int
    seconds: float
    forwards: int
    decoding: "Sample | None" = None
    """The part behind the first chunk of each answer, where it can be told: without reading prompts."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of finished answers per second."""
        return self.tokens / self.seconds


SampleT = TypeVar("SampleT", bound=Sample)


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one figure."""

    median: float
    min: float
    max: float


def interleaved(
    candidates: Mapping[str, Callable[[], SampleT]], repeats: int, progress: ProgressLine
) -> dict[str, list[SampleT]]:
    """Run every candidate once per round and return `repeats` samples of each; a round before them warms up.

    Round r begins with candidate r mod n, so none always runs on the heels of the same other.
    """
    names = list(candidates)
    samples: dict[str, list[SampleT]] = {name: [] for name in names}
    total = (repeats + 1) * len(names)
    for turn in range(total):
        number, place = divmod(turn, len(names))
        name = names[(number + place) % len(names)]
        sample = candidates[name]()
        if number > 0:
            samples[name].append(sample)
        progress.update(turn + 1, {"round": f"{number}/{repeats}", name: f"{sample.tokens_per_s:.0f} tokens/s"})
    return samples


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the range of at least one value."""
    return Spread(median(values), min(values), max(values))


def throughput(samples: Sequence[Sample]) -> Spread:
    """Return the spread of the tokens per second."""
    return spread([sample.tokens_per_s for sample in samples])


def speedup(samples: Sequence[Sample], baseline: Sequence[Sample]) -> Spread:
    """Return the spread of the ratios of tokens per second, each of one round."""
    return spread([one.tokens_per_s / other.tokens_per_s for one, other in zip(samples, baseline, strict=True)])


def machine() -> dict[str, str | int | float | bool | None]:
    """Describe processor, memory, accelerator, library versions, threads and the commit of this code."""
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
    """Return what git says about the folder of this package; None where that is no checkout."""
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run(
        [git, *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=10
    )
    return done.stdout.strip() if done.returncode == 0 else None
