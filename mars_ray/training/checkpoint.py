"""The state of a run at a step: weights, optimizer and random state of every worker, as accelerate saves them.

The folder is written by all workers together; `step.json` in it is the rest of the state, for rows, phases and
learning rate are functions of the step.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import Accelerator


@dataclass(frozen=True, slots=True)
class RunState:
    """How far a run has come."""

    steps: int = 0
    tokens: int = 0
    """Clean-stream tokens seen, padding left out."""


def save_state(folder: Path, state: RunState, accelerator: Accelerator) -> None:
    """Write this worker's part of a checkpoint into `folder`."""
    accelerator.save_state(str(folder))
    if accelerator.is_main_process:
        (folder / "step.json").write_text(json.dumps(asdict(state)) + "\n")


def load_state(folder: Path, accelerator: Accelerator) -> RunState:
    """Put weights, optimizer and random state back; return where the run was."""
    accelerator.load_state(str(folder))
    return RunState(**json.loads((folder / "step.json").read_text()))
