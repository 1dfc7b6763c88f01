"""Count the CPUs that this process may use, according to its affinity and the quotas of its cgroups.

A container with a quota sees every CPU of the machine, but threads beyond the quota only wait for each other.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from mars_ray.cgroups import CGROUPS, OWN_CGROUPS, cgroups_of


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, at least 1. Fractional quotas are rounded down."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min([cpus, *quotas()])))


def quotas(mounted: Path = CGROUPS, own_cgroups: Path = OWN_CGROUPS) -> Iterator[float]:
    """Yield the quotas, in CPUs, of this process's cgroups and their parents."""
    for version, folder in cgroups_of("cpu", mounted, own_cgroups):
        quota = _quota_2(folder / "cpu.max") if version == 2 else _quota_1(folder)
        if quota is not None:
            yield quota


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
