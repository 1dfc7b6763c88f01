"""Small real parts the tests of the engine's parts share."""

from collections.abc import Iterable
from functools import cache
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mars_ray.engine.kv.slot_allocator import CacheOp, Copy, Owner, Resize
from mars_ray.engine.request import DecodeParams
from mars_ray.engine.scheduling.detokenizer import IncrementalDetokenizer
from mars_ray.engine.scheduling.sequence import Drafts, Sequence
from mars_ray.engine.service_class import STANDARD
from mars_ray.model.resolve import resolve_model
from tests.factories.engine import request


@cache
def bundled_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(resolve_model("bundled"))


def sequence_of(
    prompt: Iterable[int],
    output: Iterable[int] = (),
    *,
    id: object = "a",
    decode: DecodeParams | None = None,
    stop_ids: Iterable[int] = (),
    seed: int = 0,
    computed: int = 0,
    slot: int | None = None,
    drafts: Iterable[int] = (),
    limit: int | None = None,
    service_class: str = STANDARD,
    **sampling: Any,
) -> Sequence:
    """A sequence that has read `prompt` and said `output`."""
    asked = request(id, prompt, decode, service_class=service_class, **sampling)
    params = asked.sampling
    return Sequence(
        request=asked,
        index=0,
        seed=seed if params.seed is None else params.seed,
        max_tokens=limit or params.max_tokens,
        stop_ids=frozenset(stop_ids) | params.stop_token_ids,
        detokenizer=IncrementalDetokenizer(bundled_tokenizer(), params.stop),
        tokens=[*asked.prompt, *output],
        num_computed_tokens=computed,
        slot=slot,
        drafts=Drafts.certain(list(drafts)),
    )


def slot_of(owner: Owner) -> int:
    """Return the slot of one that has a slot."""
    assert owner.slot is not None
    return owner.slot


class ShadowCache:
    """What the tensors of the cache would hold: a token for each position of each slot, None where nothing is."""

    def __init__(self) -> None:
        self.slots: list[list[int | None]] = []
        self.width = 0

    def apply(self, operations: list[CacheOp]) -> None:
        for operation in operations:
            match operation:
                case Copy(source, target, length):
                    self.slots[target][:length] = self.slots[source][:length]
                case Resize(slots, width):
                    kept = [slot[:width] for slot in self.slots[:slots]]
                    self.slots = [slot + [None] * (width - len(slot)) for slot in kept]
                    self.slots += [[None] * width for _ in range(slots - len(kept))]
                    self.width = width
        assert all(len(slot) == self.width for slot in self.slots), "an operation reaches past the end of a slot"

    def write(self, slot: int, start: int, tokens: Iterable[int]) -> None:
        for position, token in enumerate(tokens, start=start):
            self.slots[slot][position] = token
