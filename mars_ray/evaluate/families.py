"""Judge a model on held-out examples of the task families, with the reference decoder.

In:    a checkpoint, examples, decode options.
Out:   accuracy by the families' exact verifiers and tokens per forward, by family and over all.
Never: writes anything.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from mars_ray.data.chat import ChatEncoder
from mars_ray.data.tasks import FAMILIES, verify
from mars_ray.data.tasks.family import TaskExample
from mars_ray.data.tasks.split import examples
from mars_ray.method.reference import DecodeOptions, decode
from mars_ray.model.card import CalibrationPoint, FamilyPoint
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.progress import ProgressLine

BATCH_ROWS = 64


@dataclass(slots=True)
class _Tally:
    examples: int = 0
    right: int = 0
    tokens: int = 0
    forwards: int = 0


def heldout_examples(per_family: int, seed: int) -> list[TaskExample]:
    """Return the same number of held-out examples of every family; no training prompt is among them."""
    return [each for family in FAMILIES.values() for each in islice(examples(family, "heldout", seed), per_family)]


def measure(
    checkpoint: Checkpoint, judged: Sequence[TaskExample], options: DecodeOptions, progress: ProgressLine
) -> CalibrationPoint:
    """Decode every example and judge it; accuracy is the mean over families, tokens per forward that over all."""
    encoder = ChatEncoder(checkpoint.tokenizer)
    options = replace(options, stop_ids=checkpoint.stop_ids)
    prompts = [encoder.prompt([{"role": "user", "content": each.prompt}]) for each in judged]
    # Rows of like length share a batch: the decoder pads each to the longest.
    order = sorted(range(len(judged)), key=lambda number: len(prompts[number]))
    tallies: dict[str, _Tally] = defaultdict(_Tally)
    for start in range(0, len(order), BATCH_ROWS):
        numbers = order[start : start + BATCH_ROWS]
        batch = decode(checkpoint.network, [prompts[n] for n in numbers], options, mask_id=checkpoint.mask_id)
        texts = checkpoint.tokenizer.batch_decode([each.tokens for each in batch], skip_special_tokens=True)
        for number, decoded, text in zip(numbers, batch, texts, strict=True):
            tally = tallies[judged[number].family]
            tally.examples += 1
            tally.right += verify(judged[number].family, judged[number].answer, text)
            tally.tokens += len(decoded.tokens)
            tally.forwards += decoded.forwards
        progress.update(start + len(numbers), {})
    by_family = {
        name: FamilyPoint(
            examples=tally.examples,
            tokens_per_forward=tally.tokens / tally.forwards,
            accuracy=tally.right / tally.examples,
        )
        for name, tally in sorted(tallies.items(), key=lambda item: list(FAMILIES).index(item[0]))
    }
    return CalibrationPoint(
        threshold=1.0 if options.mode == "ar" else options.threshold,
        tokens_per_forward=sum(t.tokens for t in tallies.values()) / sum(t.forwards for t in tallies.values()),
        accuracy=sum(point.accuracy for point in by_family.values()) / len(by_family),
        examples=len(judged),
        by_family=by_family,
    )
