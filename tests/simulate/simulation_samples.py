"""Machines and loads for simulated clusters."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import pytest

from mars_ray.control.control_settings import ControlPlan
from mars_ray.engine.stats.lookahead import Lookahead, look_ahead
from mars_ray.simulate import simulator
from mars_ray.simulate.arrivals import Arrival, Arrivals
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.simulator import Simulation, SimulationOptions, simulate

SURVIVAL = {1.0: (0.0, 0.0, 0.0), 0.95: (0.5, 0.3, 0.2), 0.9: (0.6, 0.45, 0.3), 0.3: (0.8, 0.7, 0.6)}
FIXED = ControlPlan.model_validate({"ceiling": 0.95, "settings": {"policy": "fixed"}})


def accepting(survival: tuple[float, ...]) -> Lookahead:
    """Tokens at masks are accepted this often, and none is drafted."""
    none = np.zeros(len(survival))
    return look_ahead(np.array(survival), none, none)


def machine(**fields: Any) -> Machine:
    usual: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_waiting_seqs": 64,
        "max_model_len": 4096,
        "step_time": {
            "fixed_s": 0.01,
            "seq_s": 0.001,
            "position_s": 0.0002,
            "prompt_s": 0.002,
            "prompt_token_s": 0.00005,
        },
        "profile": [
            {
                "threshold": threshold,
                **{name.removesuffix("_B"): each.tolist() for name, each in found._asdict().items()},
                "agreement": 1 - (1 - threshold) / 4,
            }
            for threshold, found in ((each, accepting(survival)) for each, survival in SURVIVAL.items())
        ],
        "accuracy": [(1.0, 0.99), (0.9, 0.98), (0.3, 0.5)],
    }
    return Machine.model_validate(usual | fields)


def poisson(rate: float, seconds: float, *, prompt: int = 40, output: int = 60, seed: int = 0) -> list[Arrival]:
    random, now_s, arrivals = Random(seed), 0.0, list[Arrival]()
    while (now_s := now_s + random.expovariate(rate)) < seconds:
        arrivals.append(
            Arrival(now_s, 1 + int(random.expovariate(1 / prompt)), 1 + int(random.expovariate(1 / output)))
        )
    return arrivals


def run(arrivals: list[Arrival], plan: ControlPlan = FIXED, on: Machine | None = None, **options: Any) -> Simulation:
    mix = [1.0] * len(plan.classes)
    asked = SimulationOptions(**({"replicas": 1} | options))  # type: ignore[arg-type]
    return simulate(Arrivals(arrivals, mix=mix), on or machine(), plan, asked)


@contextmanager
def in_ticks() -> Iterator[None]:
    """Simulate clusters of all sizes in ticks, as those that are too large to be simulated step by step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "STEPPED", 0)
        yield
