"""Python runs this at its start where this folder is on its path: engine processes stall when a file says so.

The file that `MARS_STALL` names holds the fault, `hang` or `yield nothing`. The first engine that runs a sequence takes
the file away and has the fault from then on.
"""

import os
import signal
import sys
import time
from pathlib import Path

if "mars_ray.engine.process.fork_server" in sys.orig_argv:
    from mars_ray.engine.chunk import Chunk
    from mars_ray.engine.core.engine import Engine

    healthy_step = Engine.step

    def step(self: Engine) -> list[Chunk]:
        order = Path(os.environ.get("MARS_STALL", "/nonexistent"))
        if self.running and order.exists():
            fault = order.read_text()
            order.unlink()
            if fault == "hang":
                while True:
                    signal.pause()
            self.step = yield_nothing  # type: ignore[method-assign]
        return healthy_step(self)

    def yield_nothing() -> list[Chunk]:
        time.sleep(0.01)  # leaves the core to the other processes of the test
        return []

    Engine.step = step  # type: ignore[method-assign]
