"""The oracle: what thresholds somebody would have set who knew everything beforehand."""

from statistics import median_high

from benchmarks.policy.simulation_pool import FLOOR, WINDOW_S, SimulationJob, SimulationPool
from benchmarks.policy.tables import ORACLE
from mars_ray.engine.stats.profile import GRID
from mars_ray.simulate.arrivals import Arrival
from mars_ray.simulate.simulator import Simulation

ORACLE_ROUNDS = 16


def find_oracle(
    pool: SimulationPool, arrivals: tuple[Arrival, ...], speed: float, ours: Simulation, best: Simulation
) -> Simulation:
    """Return what thresholds window by window would have done for somebody who knew everything beforehand.

    Beginning with full quality everywhere, thresholds fall by a step in the windows where the SLO was missed and in
    those before them that left a queue, until as many requests meet it as with ours.
    """
    grid = [threshold for threshold in GRID if threshold >= FLOOR]
    windows = int(len(best.seconds) / WINDOW_S) + 2
    steps = [0] * windows
    for _ in range(ORACLE_ROUNDS):
        if (best.metrics.good or 0.0) >= (ours.metrics.good or 0.0):
            break
        broken = _broken_windows(best, windows)
        if not any(broken) or all(steps[each] == len(grid) - 1 for each in range(windows) if broken[each]):
            break
        # Half of the broken windows each round, the worst first: mending one often mends those behind it.
        worst = median_high(filter(None, broken))
        for each in [number for number, misses in enumerate(broken) if misses >= worst]:
            for place in range(max(0, each - 1), each + 1):
                steps[place] = min(steps[place] + 1, len(grid) - 1)
        schedule = tuple(grid[step] for step in steps)
        [best] = pool.all([SimulationJob(contender=ORACLE, arrivals=arrivals, speed=speed, schedule=schedule)])
    return best


def _broken_windows(found: Simulation, windows: int) -> list[float]:
    broken = [0.0] * windows
    for second in found.seconds:
        if second.good is not None:
            done = second.ended + second.refused
            broken[min(int(second.second / WINDOW_S), windows - 1)] += (1 - second.good) * done
    return broken
