"""The settings of `mars-ray bench serve`, and what follows from them before anything is sent."""

import json
import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mars_ray.data.prompt_file import read_prompts
from mars_ray.errors import ConfigError
from mars_ray.load.arrivals import Poisson, parse_trace, read_trace
from mars_ray.load.client import RESERVED, TIMEOUT_S
from mars_ray.load.plan import LoadPlan, Scales, closed_loop, poisson, replay
from mars_ray.load.prompts import bundled_prompts
from mars_ray.load.slo import RequestSlo, parse_slo
from mars_ray.storage.location import AnyPath

REQUESTS = 100
"""Sent when neither a number, a duration nor a trace file says how many."""
MAX_TOKENS = 128
NUMBER_MAX = 1e9
"""No setting is larger, or smaller than its inverse: what is computed from them stays finite."""
SECRET = ("api_key",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What to send where; the fields are the options of the command line."""

    url: str
    model: str | None = None
    """The model to ask for; None is the first that the endpoint lists."""
    api_key: str | None = field(default=None, repr=False)
    trace: str | None = None
    """"poisson:RATE", a trace file, or None for a closed loop."""
    clients: int | None = None
    """Requests under way at once. None is 1 in a closed loop, without bound in an open one."""
    requests: int | None = None
    duration: float | None = None
    """Seconds in which requests are sent."""
    stream: bool = True
    prompts: Path | None = None
    """File of prompts; None is the bundled one."""
    max_tokens: int | None = None
    """None is 128; for a trace file, what the trace says."""
    extra_body: str = "{}"
    """JSON object with further fields of every request."""
    speed: float = 1.0
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    slo: tuple[str, ...] = ()
    seed: int = 0
    timeout: float = TIMEOUT_S
    """Seconds for one request."""

    def __post_init__(self) -> None:
        for name in ("clients", "requests", "max_tokens"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ConfigError(f"{name} is {count}; it must be at least 1.")
        for name in ("duration", "timeout", "speed", "prompt_scale", "output_scale"):
            if (value := getattr(self, name)) is not None and not 1 / NUMBER_MAX <= value <= NUMBER_MAX:
                raise ConfigError(f"{name} is {value}; it must be in {1 / NUMBER_MAX:g}..{NUMBER_MAX:g}.")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key holds a character that no HTTP header takes; give it without line ends.")

    def command(self) -> str:
        """Return the command line that does the same, without the key."""
        words = ["mars-ray", "bench", "serve"]
        for each in fields(self):
            value, flag = getattr(self, each.name), f"--{each.name.replace('_', '-')}"
            if each.name in SECRET or value == each.default:
                continue
            if each.name == "stream":
                words.append("--no-stream")
            elif each.name == "slo":
                words += [flag, ",".join(value)]
            else:
                words += [flag, str(value)]
        return shlex.join(words)

    def limits(self) -> RequestSlo | None:
        """Return what a good request keeps."""
        slo = parse_slo(self.slo)
        if slo is not None and not self.stream and (slo.ttft_ms or slo.tpot_ms):
            raise ConfigError("slo has a limit for ttft or tpot, which only a stream shows; drop it, or --no-stream.")
        return slo

    def body(self) -> dict[str, Any]:
        """Return the further fields of every request."""
        try:
            found = json.loads(self.extra_body)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"extra_body is not JSON ({error}): {self.extra_body[:60]!r}.") from None
        if not isinstance(found, dict):
            raise ConfigError(
                f"extra_body is {self.extra_body[:60]!r}; give an object, such as '{{\"threshold\": 0.9}}'."
            )
        if taken := sorted(found.keys() & set(RESERVED)):
            raise ConfigError(f"extra_body holds {', '.join(taken)}, which other options set; take it out.")
        return found

    def plan(self) -> LoadPlan:
        """Read prompts and trace, and plan the requests."""
        trace = None if self.trace is None else parse_trace(self.trace)
        if not isinstance(trace, AnyPath):
            for name in ("speed", "prompt_scale", "output_scale"):
                if getattr(self, name) != 1.0:
                    raise ConfigError(f"{name} is {getattr(self, name)}; it is for a trace file. Give one, or drop it.")
        prompts = read_prompts(self.prompts or bundled_prompts())
        if isinstance(trace, AnyPath):
            scales = Scales(speed=self.speed, prompt=self.prompt_scale, output=self.output_scale)
            rows = read_trace(trace)
            return replay(rows, scales, prompts, self.seed, self.requests, self.duration, self.max_tokens)
        requests = REQUESTS if self.requests is None and self.duration is None else self.requests
        max_tokens = self.max_tokens or MAX_TOKENS
        if isinstance(trace, Poisson):
            return poisson(trace, prompts, self.seed, requests, self.duration, max_tokens)
        return closed_loop(prompts, self.seed, requests, max_tokens)
