"""The machine a number was measured on, for the JSON beside the number: no host names, user names or paths."""

import platform
import shutil
import subprocess
from pathlib import Path

import psutil
import torch
import transformers

from mars_ray.usable_cpus import usable_cpus

CPUINFO = Path("/proc/cpuinfo")


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
