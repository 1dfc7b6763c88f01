"""Compare estimates of the probability that a draft from masks is right, on answers that they have not learned from.

    python -m benchmarks.drafts.estimate --model smollm2 --adapter smollm2 --json estimate.json

Three estimates of the same drafts: the product of the confidences, this product times the share of right drafts by
depth (the table of the block choice), and the product of a logistic estimate by confidence, depth, temperature and
position after other drafts. The two latter learn from half of the conversations. The score of all three is the mean
squared error on the other half (Brier score), by seed. In half of each half, answers are sampled.
"""

import argparse
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import mul
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

from benchmarks.drafts.workloads import Messages, chat, gsm8k, summaries
from benchmarks.report import write_report
from mars_ray import LLM, SamplingParams
from mars_ray.data.tasks.split import mixture
from mars_ray.engine.drafting.estimate import CERTAIN, AcceptanceEstimate
from mars_ray.engine.sampling.draft_choice import DraftChoice
from mars_ray.engine.scheduling.sequence import Sequence as EngineSequence
from mars_ray.engine.stats.block_choice import BlockChoice
from mars_ray.engine.stats.verified_drafts import COMMON_DRAFTS
from mars_ray.measure import deviation
from mars_ray.program import run_program

DEEPEST = 16.0
"""Scale of the depth, so that features are small numbers."""

Estimate = Callable[["MaskDrafts"], list[float]]


@dataclass(frozen=True)
class MaskDrafts:
    """The drafts from masks of one step, of which the first `right` were right and `judged` were verified."""

    probabilities: list[float]
    temperature: float
    behind: int
    """Number of right drafts that the masks stood after."""
    right: int
    judged: int

    @property
    def features(self) -> list[tuple[float, ...]]:
        """Input of the logistic estimate, by draft."""
        return [
            (1.0, _log_odds(probability), depth / DEEPEST, self.temperature, float(self.behind > 0))
            for depth, probability in enumerate(self.probabilities)
        ]


def _log_odds(probability: float) -> float:
    if not 0 < probability < 1:
        return CERTAIN if probability else -CERTAIN
    return max(-CERTAIN, min(CERTAIN, math.log(probability / (1 - probability))))


def collect(llm: LLM, conversations: Sequence[Messages], max_tokens: int, temperature: float) -> list[MaskDrafts]:
    """Answer conversations in exact mode without drafts from text, and return the drafts from masks."""
    collected: list[MaskDrafts] = []
    behind: dict[EngineSequence, int] = {}

    def verified(_: DraftChoice, sequence: EngineSequence, right: int, tokens: int) -> None:
        drafts = sequence.drafts
        if judged := min(tokens, len(drafts.tokens)):
            collected.append(MaskDrafts(drafts.probabilities, temperature, behind.get(sequence, 0), right, judged))
        behind[sequence] = right

    with (
        patch.object(DraftChoice, "choose", lambda *_: None),
        patch.object(DraftChoice, "verified", verified),
        patch.object(BlockChoice, "next_step", lambda *_: None),  # all masks at a fixed price, whatever steps take
    ):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        llm.chat(conversations, sampling, mode="exact", progress=False)
    return collected


def by_confidence(drafts: MaskDrafts) -> list[float]:
    """Return the product of the confidences up to each draft."""
    return list(accumulate(drafts.probabilities, mul))


def by_table(learned: Sequence[MaskDrafts]) -> Estimate:
    """Return the estimate of the block choice (see `engine/stats/verified_drafts`)."""
    expected: dict[int, float] = defaultdict(float)
    right: dict[int, int] = defaultdict(int)
    for drafts in learned:
        for depth, product in enumerate(by_confidence(drafts)):
            expected[depth] += product
            right[depth] += depth < drafts.right
    common = (sum(right.values()) + 1) / (sum(expected.values()) + 1)
    return lambda drafts: [
        min(1.0, product * (right[depth] + COMMON_DRAFTS * common) / (expected[depth] + COMMON_DRAFTS))
        for depth, product in enumerate(by_confidence(drafts))
    ]


def by_logistic(learned: Sequence[MaskDrafts]) -> Estimate:
    """Return the logistic estimate, which starts from the confidence."""
    estimate = AcceptanceEstimate((0.0, 1.0, 0.0, 0.0, 0.0))
    for drafts in learned:
        for index, features in enumerate(drafts.features[: drafts.judged]):
            estimate.observe(features, index < drafts.right)
    return lambda drafts: list(accumulate(map(estimate.probability, drafts.features), mul))


def brier_score(estimate: Estimate, heldout: Sequence[MaskDrafts]) -> float:
    """Return the mean squared error of the probability that a draft is right along with all drafts before it."""
    return mean(
        (probability - (depth < drafts.right)) ** 2
        for drafts in heldout
        for depth, probability in enumerate(estimate(drafts))
    )


def conversations_of(model: str, count: int, seed: int) -> list[Messages]:
    """Return conversations of the kind that a model was made for."""
    if model == "bundled":
        return [list(example.messages) for example in islice(mixture("heldout", seed), count)]
    draw = random.Random(seed)
    mixed = [one for make in (gsm8k, summaries, chat) for one in make(math.ceil(count / 3), draw).conversations]
    draw.shuffle(mixed)
    return mixed[:count]


def measure(llm: LLM, model: str, count: int, max_tokens: int, seed: int) -> dict[str, float]:
    """Return the Brier scores of the estimates for one seed."""
    conversations = conversations_of(model, count, seed)
    halves = []
    for half in (conversations[::2], conversations[1::2]):
        greedy, sampled = collect(llm, half[::2], max_tokens, 0.0), collect(llm, half[1::2], max_tokens, 0.7)
        halves.append(random.Random(seed).sample(mixed := [*greedy, *sampled], len(mixed)))
    learned, heldout = halves
    estimates = {"confidence": by_confidence, "table": by_table(learned), "logistic": by_logistic(learned)}
    scores = {name: brier_score(estimate, heldout) for name, estimate in estimates.items()}
    return scores | {"drafts": sum(len(drafts.probabilities) for drafts in heldout)}


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description="Compare estimates of the probability that a draft is right.")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--adapter")
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, adapter=arguments.adapter, max_num_seqs=arguments.callers)
    runs = []
    for seed in range(arguments.seeds):
        runs.append(measure(llm, arguments.model, arguments.conversations, arguments.max_tokens, seed))
        print(json.dumps(runs[-1]), flush=True)
    summary: dict[str, Any] = {
        name: {"mean": mean(run[name] for run in runs), "std": deviation([run[name] for run in runs])}
        for name in runs[0]
    }
    for name in ("table", "logistic"):
        gains = [run["confidence"] - run[name] for run in runs]
        summary[name]["gain"] = {"mean": mean(gains), "std": deviation(gains)}
    print(json.dumps(summary, indent=1))
    options = {name: value for name, value in vars(arguments).items() if name != "json"}
    write_report(arguments.json, {**options, "runs": runs, "summary": summary})


if __name__ == "__main__":
    run_program("benchmarks.drafts.estimate", main)
