"""Measure the memory that this process may still take, according to the machine and the limits of its cgroups.

A container with a limit sees the memory of the whole machine, and is killed when it exceeds its limit.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

from mars_ray.cgroups import CGROUPS, OWN_CGROUPS, cgroups_of

_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""Files with the limit and the usage of a cgroup by version, and the field of `memory.stat` with cached pages of files.
Linux drops these pages before it lets a cgroup exceed its limit."""


def usable_memory_bytes() -> int:
    """Return the bytes of memory that this process may still take."""
    available: int = psutil.virtual_memory().available
    return max(0, min([available, *rooms()]))


def rooms(mounted: Path = CGROUPS, own_cgroups: Path = OWN_CGROUPS) -> Iterator[int]:
    """Yield the bytes that are left within the limits of this process's cgroups and their parents."""
    for version, folder in cgroups_of("memory", mounted, own_cgroups):
        limit, usage, cached = _FILES[version]
        try:
            room = int((folder / limit).read_text()) - int((folder / usage).read_text())
            fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield room + int(fields[cached])
        except (OSError, ValueError, KeyError):  # no limit, which is "max"
            continue
