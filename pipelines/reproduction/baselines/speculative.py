"""Speculative decoding with greedy verification; the draft, the target or both may use masks.

The tokens equal autoregressive decoding of the target, up to rounding. With a mask window of the target, the verified
tokens are followed by tokens of threshold decoding. Nothing is sampled.

Sources: arXiv 2211.17192; for masks arXiv 2604.07023, section 4.6. In each round the draft network proposes tokens, and
one forward of the target verifies them and adds the token after the last correct one.

A draft network with a window proposes several tokens per forward. A target with a window has a group of masks for each
possible number of correct drafts: group j sees the prefix, the first j drafts and itself, and its positions continue
after them. The last of these j drafts predicts the target's own next token, so the masks have the same positions as in
threshold decoding and propose the tokens after that token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.errors import ConfigError
from mars_ray.method.acceptance import accepted_lengths, confidence
from mars_ray.method.metric import Metric
from pipelines.reproduction.baselines.output import BaselineOutput
from pipelines.reproduction.baselines.reader import Reader
from pipelines.reproduction.baselines.verify import verify_greedily


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskWindow:
    """Settings for the masks of a network. Raises `ConfigError` for values out of range."""

    block: int = 1
    """Tokens proposed per forward: the autoregressive token and block - 1 masks."""
    threshold: float = 1.0
    """Minimum probability to accept the token of a mask; 1 accepts no mask."""

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ConfigError(f"block is {self.block}; it must be at least 1.")
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold is {self.threshold}; it must be in 0..1.")

    def masks(self, room: int) -> int:
        """Return the number of useful masks if up to `room` tokens are wanted, including the autoregressive token."""
        return 0 if self.threshold >= 1 else min(self.block, room) - 1

    def accept(self, logits_WV: Tensor) -> list[int]:
        """Return the accepted tokens, at least the first token."""
        confidence_1W = confidence(logits_WV, Metric.PROBABILITY)[None]
        threshold_1 = torch.full((1,), self.threshold, device=confidence_1W.device)
        accepted = int(accepted_lengths(confidence_1W, threshold_1, Metric.PROBABILITY))
        tokens: list[int] = logits_WV[:accepted].argmax(dim=-1).tolist()
        return tokens


AUTOREGRESSIVE = MaskWindow()


@torch.inference_mode()
def decode_speculative(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    draft_length: int,
    max_tokens: int,
    stop_ids: frozenset[int],
    mask_id: int,
    draft_window: MaskWindow = AUTOREGRESSIVE,
    target_window: MaskWindow = AUTOREGRESSIVE,
) -> list[BaselineOutput]:
    """Decode each prompt with `draft_length` drafts per round; prompts must not be empty.

    A round yields 1..draft_length + target_window.block tokens.
    """
    if draft_length < 1:
        raise ConfigError(f"draft_length is {draft_length}; it must be at least 1.")
    outputs = []
    for prompt in prompts:
        output = BaselineOutput(max_tokens, stop_ids)
        draft_reader = Reader(draft, mask_id)
        target_reader = Reader(target, mask_id)
        drafter = Drafter(draft_reader, draft_window, stop_ids, mask_id)
        verifier = Verifier(target_reader, target_window, mask_id)
        while not output.is_finished:
            prefix = [*prompt, *output.tokens]
            drafts = drafter.propose(prefix, min(draft_length, output.left - 1))
            accepted, right = verifier.verify(prefix, drafts, output.left)
            draft_reader.crop(len(prefix) + right)
            output.extend(accepted)
        output.forwards = target_reader.forwards
        output.draft_forwards = draft_reader.forwards
        outputs.append(output)
    return outputs


class Drafter:
    """Proposes tokens for one sequence with the draft network."""

    def __init__(self, reader: Reader, window: MaskWindow, stop_ids: frozenset[int], mask_id: int) -> None:
        self._reader = reader
        self._window = window
        self._stop_ids = stop_ids
        self._mask_id = mask_id

    def propose(self, prefix: list[int], length: int) -> list[int]:
        """Return `length` tokens to follow `prefix`, or fewer if one of them ends the answer."""
        drafts: list[int] = []
        while len(drafts) < length and not self._stop_ids.intersection(drafts):
            ids = [*prefix, *drafts]
            masks = self._window.masks(length - len(drafts))
            logits_WV = self._reader.read(ids + [self._mask_id] * masks, last=1 + masks).logits_MV
            self._reader.crop(len(ids))
            drafts += self._window.accept(logits_WV)
        return drafts


class Verifier:
    """Verifies the drafts of one sequence with the target network."""

    def __init__(self, reader: Reader, window: MaskWindow, mask_id: int) -> None:
        self._reader = reader
        self._window = window
        self._mask_id = mask_id

    def verify(self, prefix: list[int], drafts: list[int], room: int) -> tuple[list[int], int]:
        """Return the tokens after `prefix`, of which up to `room` are needed, and the number of correct drafts."""
        masks = self._window.masks(room)
        outcomes = len(drafts) + 1
        tokens = [*prefix, *drafts]
        if masks:
            groups = MaskGroups(prefix=len(prefix), outcomes=outcomes, masks=masks)
            logits_MV = self._reader.read(
                tokens + [self._mask_id] * (outcomes * masks),
                last=outcomes + outcomes * masks,
                positions=groups.positions()[self._reader.length :],
                visible_QS=groups.visible(self._reader.length),
            ).logits_MV
        else:
            logits_MV = self._reader.read(tokens, last=outcomes).logits_MV
        accepted = verify_greedily(drafts, logits_MV[:outcomes].argmax(dim=-1).tolist())
        right = len(accepted) - 1
        # Wrong drafts and all masks are after the correct drafts.
        self._reader.crop(len(prefix) + right)
        if masks:
            group = outcomes + right * masks
            window_WV = torch.cat([logits_MV[right : right + 1], logits_MV[group : group + masks]])
            accepted[right:] = self._window.accept(window_WV)
        return accepted, right


@dataclass(frozen=True, slots=True)
class MaskGroups:
    """Slots of a verifying forward: the prefix, the drafts, then the masks of group 0, group 1, ...

    There are `outcomes` - 1 drafts, and `outcomes` groups of `masks` masks each.
    """

    prefix: int
    outcomes: int
    masks: int

    @property
    def _tokens(self) -> int:
        return self.prefix + self.outcomes - 1

    def positions(self) -> list[int]:
        """Return the position of every slot; group j continues after the first j drafts."""
        of_masks = [self.prefix + group + mask for group in range(self.outcomes) for mask in range(self.masks)]
        return [*range(self._tokens), *of_masks]

    def visible(self, cached: int) -> Tensor:
        """Return the slots that each slot from `cached` on sees, bool [Q, S]."""
        slot_S = torch.arange(self._tokens + self.outcomes * self.masks)
        # Tokens are group -1 and see only tokens, because all masks come after them.
        group_S = torch.where(slot_S < self._tokens, -1, (slot_S - self._tokens) // self.masks)
        sees_tokens_S = torch.where(group_S < 0, self._tokens, self.prefix + group_S)
        slot_Q1, group_Q1, sees_tokens_Q1 = (slots[cached:, None] for slots in (slot_S, group_S, sees_tokens_S))
        own_or_token_QS = (group_S == group_Q1) | (slot_S < sees_tokens_Q1)
        return own_or_token_QS & (slot_S <= slot_Q1)
