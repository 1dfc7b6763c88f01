"""Print what the refusal of each hostile body costs: CPU seconds, megabytes and name, the dearest in memory last.

A process of its own can tell the peak of its memory. Usage: python -m tests.platform.body_costs N, to try each Nth body
"""

import gc
import json
import re
import sys
import time
from itertools import islice
from pathlib import Path

from pydantic import BaseModel, ValidationError

from mars_ray.chat.validation_errors import validation_error
from mars_ray.errors import RequestError
from mars_ray.openai_api.api_error import ApiError
from mars_ray.serve.middleware.json_body import parse
from tests.platform.hostile_bodies import hostile_bodies, models


def refuse(model: type[BaseModel], body: bytes) -> None:
    """Do what a gateway does with a body until it is refused."""
    value = parse(body)
    try:
        model.model_validate(value)
    except (ApiError, RequestError):
        pass
    except ValidationError as error:
        validation_error(error.errors(), value)


def memory_bytes(name: str) -> int:
    """Return a figure of /proc/self/status: VmRSS is now, VmHWM the peak."""
    [kib] = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024


def main() -> None:
    gc.freeze()
    costs: list[tuple[float, float, str]] = []
    for method, path, name, make in islice(hostile_bodies(), 0, None, int(sys.argv[1])):
        body = make().encode()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before_bytes, began_s = memory_bytes("VmRSS"), time.thread_time()
        refuse(models()[method, path], body)
        seconds = time.thread_time() - began_s
        costs.append(((memory_bytes("VmHWM") - before_bytes) / 1e6, seconds, f"{path} {name}"))
    for megabytes, seconds, name in sorted(costs):
        print(json.dumps({"name": name, "megabytes": megabytes, "seconds": seconds}))


if __name__ == "__main__":
    main()
