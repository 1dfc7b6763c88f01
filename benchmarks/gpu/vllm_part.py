"""Compare MARS inside vLLM with stock vLLM and with its n-gram speculation, one engine after the other.

An engine that does not start is reported with the last line of its output, and the others go on.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from benchmarks.gpu.settings import AR, CALLERS, MASKS, SMALL_CALLERS
from mars_ray.machines.step_model import StepModel

TIE = 0.05
"""Difference of the two highest log-probabilities below which bfloat16 kernels may choose either token."""
GRAPH_CALLERS = (1, 32, 128)

Engine = tuple[str, list[str], Sequence[int]]
"""Name, arguments of `vllm_engine`, and numbers of callers."""


def speed_engines(small: bool) -> list[Engine]:
    """Return stock vLLM, n-gram speculation, and the plug-in with each number of masks."""
    callers = SMALL_CALLERS if small else CALLERS
    mars: list[Engine] = [(f"mars K {masks}", ["--kind", "mars", "--masks", str(masks)], callers) for masks in MASKS]
    return [("stock", ["--kind", "stock"], callers), ("ngram", ["--kind", "ngram"], callers), *mars]


def graph_engines(small: bool) -> list[Engine]:
    """Return the plug-in with CUDA graphs of each kind."""
    callers = SMALL_CALLERS[:1] if small else GRAPH_CALLERS
    return [
        (f"graphs {graphs}", ["--kind", "mars", "--masks", str(MASKS[-1]), "--graphs", graphs], callers)
        for graphs in ("full", "piecewise", "off")
    ]


def run_engines(engines: Sequence[Engine], folder: Path, device: str, small: bool, limit_s: float) -> dict[str, Any]:
    """Return the report of each engine, or the reason why it has none. All engines together get `limit_s` seconds."""
    end_s = time.monotonic() + limit_s
    prompts, tokens = (2, 12) if small else (24, 128)
    shared = ["--folder", str(folder), "--device", device, "--prompts", str(prompts), "--tokens", str(tokens)]
    # Triton reads its variable when transformers is imported, before the engine's own process could set it.
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    reports: dict[str, Any] = {}
    for name, words, callers in engines:
        command = [sys.executable, "-m", "benchmarks.gpu.vllm_engine", *shared, *words]
        command += ["--callers", ",".join(map(str, callers))]
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            left_s = max(1.0, end_s - time.monotonic())
            process = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment, timeout=left_s
            )
        except subprocess.TimeoutExpired:
            reports[name] = {"unavailable": f"not done when the part had run for {limit_s:.0f} s"}
            continue
        if process.returncode:
            reports[name] = {"unavailable": (process.stderr.strip().splitlines() or ["no output"])[-1]}
        else:
            reports[name] = json.loads(process.stdout.splitlines()[-1])
    return reports


def equality(reports: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Count the answers that equal those of stock vLLM, that differ first at a tie, and that differ otherwise.

    A threshold below 1 may change answers, so only `ar` and exact decoding must be equal.
    """
    counts: dict[str, dict[str, int]] = {}
    stock = reports.get("stock", {})
    if "answers" not in stock:
        return counts
    for name, report in reports.items():
        for setting, answers in report.get("answers", {}).items() if name != "stock" else ():
            count = counts[f"{name}: {setting}"] = {"equal": 0, "tied": 0, "other": 0}
            for ours, theirs, gaps in zip(answers, stock["answers"][AR.name], stock["gaps"], strict=True):
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
                if ours == theirs:
                    count["equal"] += 1
                else:
                    count["tied" if same < len(gaps) and gaps[same] < TIE else "other"] += 1
    return counts


def predictions(reports: dict[str, Any], model: StepModel, tokens_per_seq: int) -> Iterator[dict[str, Any]]:
    """Yield each measured speed next to the speed that the step model of `mars-ray plan` gives.

    The prediction takes the measured tokens per step, and counts all positions that vLLM computes: 1 + 2 K
    for every request of the plug-in, whatever its own setting. For n-grams, tokens per step and prediction are unknown.
    """
    for name, report in reports.items():
        for row in report.get("speed", ()):
            step_s = model.seconds(
                num_seqs=row["callers"],
                positions=row["callers"] * (1 + 2 * report["masks"]),
                kv_tokens=row["callers"] * tokens_per_seq,
                prompt_tokens=0,
            )
            known = "tokens_per_step" in row or (row["setting"] == AR.name and name != "ngram")
            modelled = row["callers"] * row.get("tokens_per_step", 1.0) / step_s if known else None
            yield {"engine": name, **row, "modelled_tokens_per_s": modelled}
