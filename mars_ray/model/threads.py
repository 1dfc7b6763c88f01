"""How many threads suit a model on a CPU."""

from pathlib import Path

from mars_ray.model.weights import count_parameters
from mars_ray.usable_cpus import usable_cpus

PARAMETERS_PER_THREAD = 50_000_000
"""With so many parameters for each thread the network takes most of a step. What surrounds it runs in one thread: of
smaller models several engines of one thread each decode more than one engine of several threads."""


def suitable_threads(folder: Path) -> int:
    """Return the threads of an engine where others of the same model may stand beside it."""
    return max(1, -(-count_parameters(folder).total() // PARAMETERS_PER_THREAD))


def threads_alone(folder: Path, engines: int = 1) -> int:
    """Return the threads of each of so many engines that have this machine to themselves."""
    return 1 if suitable_threads(folder) == 1 else max(1, usable_cpus() // engines)
