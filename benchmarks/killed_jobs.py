"""Processes of a job to kill or to measure, the moments of kills, and the rows that a job left out or repeated."""

import random
from collections import Counter
from collections.abc import Iterable

import psutil


def job_processes(driver_pid: int, name: str) -> list[psutil.Process]:
    """Return the processes below a driver whose name or command contains `name`."""
    try:
        children = psutil.Process(driver_pid).children(recursive=True)
    except psutil.Error:  # the driver has ended
        return []
    return [process for process in children if name in _command(process)]


def kill_moments(rows: int, kills: int, seed: int) -> list[float]:
    """Return the numbers of rows after which to kill, in order and spread over the job."""
    chance = random.Random(seed)
    return sorted(chance.uniform(0.02, 0.98) * rows for _ in range(kills))


def row_faults(ids: Iterable[str], rows: int) -> dict[str, int]:
    """Count the faults of an output that should have the ids row-0, row-1, ... once each."""
    counts = Counter(ids)
    wanted_ids = {f"row-{number}" for number in range(rows)}
    return {
        "missing": len(wanted_ids - counts.keys()),
        "twice": sum(count > 1 for count in counts.values()),
        "unasked": len(counts.keys() - wanted_ids),
    }


def _command(process: psutil.Process) -> str:
    try:
        return " ".join((process.name(), *process.cmdline()))
    except psutil.Error:
        return ""
