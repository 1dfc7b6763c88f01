"""Save and load the state of a run: weights, optimizer and random state of every worker, as accelerate saves them.

All workers write the folder together. The file `step.json` in it holds the step, which is the rest of the state,
because rows, phases and learning rate depend only on the step.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import Accelerator


@dataclass(frozen=True, slots=True)
class RunState:
    """Progress of a run."""

    steps: int = 0
    tokens: int = 0
    """Tokens of the clean stream seen so far, without padding."""


def save_state(folder: Path, state: RunState, accelerator: Accelerator) -> None:
    """Write this worker's part of a checkpoint into `folder`."""
    accelerator.save_state(str(folder))
    if accelerator.is_main_process:
        (folder / "step.json").write_text(json.dumps(asdict(state)) + "\n")


def load_state(folder: Path, accelerator: Accelerator) -> RunState:
    """Restore weights, optimizer and random state; return the progress of the run."""
    accelerator.load_state(str(folder))
    return RunState(**json.loads((folder / "step.json").read_text()))
