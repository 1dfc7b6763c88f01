"""Choose the number of threads for a model on a CPU."""

from mars_ray.usable_cpus import usable_cpus

PARAMETERS_PER_THREAD = 50_000_000
"""Number of parameters per thread. With fewer parameters, the network no longer takes up most of a step. The rest of a
step runs in one thread, so for smaller models several engines with one thread each are faster than one engine with
several threads."""


def suitable_threads(parameters: int) -> int:
    """Return the number of threads of an engine that shares the machine with other engines of the same model."""
    return max(1, -(-parameters // PARAMETERS_PER_THREAD))


def threads_alone(parameters: int, engines: int = 1) -> int:
    """Return the number of threads per engine for the case that `engines` engines have this machine to themselves."""
    return 1 if suitable_threads(parameters) == 1 else max(1, usable_cpus() // engines)
