"""Methods that `collective_rpc` calls in every worker while the engine runs."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mars_ray.errors import ConfigError
from mars_ray.vllm.forward_log import LoggedForward
from mars_ray.vllm.runner.model_state import MarsModelState


class MarsWorkerExtension:
    """Change the threshold, and read what lookahead gains."""

    model_runner: Any

    @property
    def _mars(self) -> MarsModelState:
        state: MarsModelState = self.model_runner.model_state
        return state

    def set_mars_threshold(self, threshold: float) -> None:
        """Set the threshold of requests that set none, from the next step on. Raises `ConfigError` out of 0 to 1."""
        self.set_mars_thresholds(dict.fromkeys(self._mars.settings.classes, threshold))

    def set_mars_thresholds(self, by_class: Mapping[str, float]) -> None:
        """Set the thresholds of some service classes, as `set_mars_threshold` does for all of them."""
        for name, threshold in by_class.items():
            if name not in self._mars.settings.classes:
                raise ConfigError(f"there is no class {name!r}; there are {', '.join(self._mars.settings.classes)}.")
            if not 0 <= threshold <= 1:
                raise ConfigError(f"threshold is {threshold}, must be 0 to 1.")
        self._mars.set_thresholds(by_class)

    def mars_forwards(self) -> list[LoggedForward]:
        """Return the forwards of single requests since the last call, at most 1,024."""
        return self._mars.forwards.drain()

    def mars_record(self) -> dict[str, Any]:
        """Return counts of lookahead, step times by positions, and the number of requests without lookahead."""
        state = self._mars
        return {
            "lookahead": asdict(state.counters.record()),
            "step_times": {positions: asdict(total) for positions, total in state.step_times.sums.items()},
            "requests_without_lookahead": state.refused,
        }
