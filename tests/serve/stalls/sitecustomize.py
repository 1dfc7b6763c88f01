"""Python runs this at its start where this folder is on its path: stalls go to a file per process in `MARS_STALLS`."""

import os
import time
from contextlib import suppress
from pathlib import Path

from stalls import watched


def note(seconds: float, callback: str) -> None:
    # The folder goes once the test is over, before the last of the processes.
    with suppress(OSError), (Path(os.environ["MARS_STALLS"]) / str(os.getpid())).open("a") as noted:
        noted.write(f"{time.time()} {seconds:.3f} {callback}\n")


watching = watched(note)
watching.__enter__()  # to the end of the process
