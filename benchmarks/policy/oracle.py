"""Find the oracle: a schedule of thresholds made with knowledge of all arrivals."""

from statistics import median_high

from benchmarks.policy.simulation_pool import FLOOR, WINDOW_S, SimulationJob, SimulationPool
from benchmarks.policy.tables import ORACLE
from mars_ray.engine.stats.grid import GRID
from mars_ray.simulate.arrivals import Arrival
from mars_ray.simulate.simulator import Simulation

ORACLE_ROUNDS = 16


def find_oracle(
    pool: SimulationPool, arrivals: tuple[Arrival, ...], part: int, speed: float, ours: Simulation, best: Simulation
) -> Simulation:
    """Search for a schedule, window by window, that meets the SLO as often as our policy; return its simulation.

    All windows start at full quality. Thresholds fall by a step in each window that misses the SLO and in the window
    before it, until as many requests meet the SLO as with our policy.
    """
    grid = [threshold for threshold in GRID if threshold >= FLOOR]
    windows = int(len(best.seconds) / WINDOW_S) + 2
    steps = [0] * windows
    for _ in range(ORACLE_ROUNDS):
        if (best.metrics.good or 0.0) >= (ours.metrics.good or 0.0):
            break
        broken = _broken_windows(best, windows)
        if not any(broken) or all(steps[number] == len(grid) - 1 for number in range(windows) if broken[number]):
            break
        # Each round lowers the worse half of the broken windows, because that often repairs later windows too.
        worst = median_high(filter(None, broken))
        for number in [number for number, misses in enumerate(broken) if misses >= worst]:
            for window in range(max(0, number - 1), number + 1):
                steps[window] = min(steps[window] + 1, len(grid) - 1)
        schedule = tuple(grid[step] for step in steps)
        job = SimulationJob(contender=ORACLE, arrivals=arrivals, speed=speed, schedule=schedule, part=part)
        [best] = pool.all([job])
    return best


def _broken_windows(simulation: Simulation, windows: int) -> list[float]:
    """Return the number of requests in each window that missed the SLO."""
    broken = [0.0] * windows
    for second in simulation.seconds:
        if second.good is not None:
            requests = second.ended + second.refused
            broken[min(int(second.second / WINDOW_S), windows - 1)] += (1 - second.good) * requests
    return broken
