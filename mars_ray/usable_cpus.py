"""Count the CPUs that this process may use, according to its affinity and the quotas of its cgroups.

A container with a quota sees every CPU of the machine, but threads beyond the quota only wait for each other.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, at least 1. Fractional quotas are rounded down."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min([cpus, *quotas()])))


def quotas(mounted: Path = CGROUPS, own_cgroups: Path = OWN_CGROUPS) -> Iterator[float]:
    """Yield the quotas, in CPUs, of this process's cgroups (version 1 or 2) and their parents."""
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mounted / controllers if controllers else mounted
        if controllers and not root.is_dir():
            root = mounted / "cpu"
        # A container sees its own cgroup at the root, but `path` is the path on the host.
        inside = root.joinpath(*Path(path).parts[1:])
        for folder in (inside, *inside.parents):
            quota = _quota_2(folder / "cpu.max") if not controllers else _quota_1(folder)
            if quota is not None:
                yield quota
            if folder == root:
                break


def _quota_2(file: Path) -> float | None:
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota < 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
