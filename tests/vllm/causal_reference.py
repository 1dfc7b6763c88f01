"""The rule of the plug-in in plain Python, without a cache: masks follow the last draft only.

It differs from `mars_ray.method.reference` in two ways that vLLM brings: a step that reads a prompt looks at no mask,
and attention is causal, so a wrong draft voids all masks of its step. With an adapter the threshold applies to drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoModelForCausalLM

from mars_ray.method.acceptance import confidence
from mars_ray.method.metric import Metric
from mars_ray.method.reference import last_logits
from mars_ray.vllm.step_rule import LEAST_LIKELY

Choices = Callable[[list[int], int], list[tuple[int, float]]]
"""Returns the most likely token after each of the last `count` ids, and its probability."""

Ratio = Callable[[list[int], int], float]
"""Returns the probability of an id after other ids, divided by that of the most likely one."""


@dataclass
class CausalAnswer:
    tokens: list[int] = field(default_factory=list)
    forwards: int = 0
    accepted: int = 0
    kept: int = 0
    """Drafts that the threshold kept in place of the most likely token."""


def decode_causally(
    choices: Choices,
    prompt: Sequence[int],
    *,
    threshold: float,
    masks: int,
    mask_id: int,
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    ratio: Ratio | None = None,
) -> CausalAnswer:
    answer = CausalAnswer()
    drafts: list[int] = []
    while len(answer.tokens) < max_tokens and not stop_ids & set(answer.tokens):
        looks = masks if answer.tokens else 0
        fed = [*prompt, *answer.tokens, *drafts, *[mask_id] * looks]
        read = choices(fed, len(drafts) + 1 + looks)
        right = 0
        while right < len(drafts):
            chosen, draft = read[right][0], drafts[right]
            before = [*prompt, *answer.tokens, *drafts[:right]]
            if draft != chosen and not (ratio and threshold < 1 and ratio(before, draft) >= threshold):
                break
            answer.kept += draft != chosen
            right += 1
        answer.forwards += 1
        answer.tokens += [*drafts[:right], read[right][0]]
        ahead = read[len(drafts) + 1 :] if right == len(drafts) else []
        drafts, likely = [], 1.0
        for token, sure in ahead:
            if not ratio and not drafts and sure >= threshold and threshold < 1:
                answer.tokens.append(token)
                answer.accepted += 1
                continue
            likely *= sure
            if likely < LEAST_LIKELY:
                break
            drafts.append(token)
    end = next((i + 1 for i, token in enumerate(answer.tokens) if token in stop_ids), max_tokens)
    del answer.tokens[min(end, max_tokens) :]
    return answer


def choices_of(folder: Path, mask_id: int) -> Choices:
    """The choices of the network in `folder`, which runs in transformers without a cache."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()

    def choices(ids: list[int], count: int) -> list[tuple[int, float]]:
        logits_WV = last_logits(network, ids, count, mask_id)
        sure = confidence(logits_WV, Metric.PROBABILITY).tolist()
        return list(zip(logits_WV.argmax(dim=-1).tolist(), sure, strict=True))

    return choices
