"""Compare the answers of the plug-in with those of stock vLLM."""

from itertools import takewhile
from typing import Any

from benchmarks.gpu.settings import AR

TIE = 0.05
"""Difference of the two highest log-probabilities below which bfloat16 kernels may choose either token."""


def equality(lines: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Count the answers that equal those of stock vLLM, that differ first at a tie, and that differ otherwise.

    A threshold below 1 may change answers, so only `ar` and exact decoding must be equal.
    """
    answered = [line for line in lines if "answers" in line]
    stock = [line for line in answered if line["engine"] == "stock" and line["setting"] == AR.name]
    counts: dict[str, dict[str, int]] = {}
    for line in answered if stock else ():
        if line["engine"] == "stock":
            continue
        count = counts[f"{line['engine']}: {line['setting']}"] = {"equal": 0, "tied": 0, "other": 0}
        for ours, theirs, gaps in zip(line["answers"], stock[-1]["answers"], stock[-1]["gaps"], strict=True):
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
            tied = same < len(gaps) and gaps[same] < TIE
            count["equal" if ours == theirs else "tied" if tied else "other"] += 1
    return counts
