"""Speculative decoding with greedy verification, its draft and its target either of them with masks.

The tokens are those of autoregressive decoding of the target, up to its rounding; with a window of the target, behind
verified tokens come those that threshold decoding may give. Nothing is sampled.

Sources: arXiv 2211.17192; the masks: arXiv 2604.07023, section 4.6. A round: the draft proposes tokens, one forward of
the target verifies them, and gives the token behind those that are right.

A draft with a window proposes several tokens in a forward. A target with a window carries a group of masks for each
number of drafts that may turn out right: group j sees the prefix, the first j drafts and itself, and its positions go
on from there. The last of these j drafts predicts the target's own next token, so the masks stand where threshold
decoding from there would put them, and propose the tokens after that one.
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
    """Use of a network's own masks. Raises `ConfigError` for values out of range."""

    block: int = 1
    """Tokens proposed after a token: the autoregressive one and block - 1 masks."""
    threshold: float = 1.0
    """Least probability to accept the token of a mask; 1 accepts none."""

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ConfigError(f"block is {self.block}; it must be at least 1.")
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold is {self.threshold}; it must be in 0..1.")

    def masks(self, room: int) -> int:
        """Return the masks worth feeding when `room` tokens are wanted, the autoregressive one among them."""
        return 0 if self.threshold >= 1 else min(self.block, room) - 1

    def accept(self, logits_WV: Tensor) -> list[int]:
        """Return the tokens taken, at least the first."""
        certain_1W = confidence(logits_WV, Metric.PROBABILITY)[None]
        threshold_1 = torch.full((1,), self.threshold, device=certain_1W.device)
        kept = int(accepted_lengths(certain_1W, threshold_1, Metric.PROBABILITY))
        tokens: list[int] = logits_WV[:kept].argmax(dim=-1).tolist()
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
    """Decode each prompt, none of them empty, with `draft_length` drafts a round.

    A round gives 1..draft_length + target_window.block tokens.
    """
    if draft_length < 1:
        raise ConfigError(f"draft_length is {draft_length}; it must be at least 1.")
    outputs = []
    for prompt in prompts:
        output = BaselineOutput(max_tokens, stop_ids)
        drafter = Drafter(Reader(draft, mask_id), draft_window, stop_ids, mask_id)
        verifier = Verifier(Reader(target, mask_id), target_window, mask_id)
        while not output.is_finished:
            prefix = [*prompt, *output.tokens]
            drafts = drafter.propose(prefix, min(draft_length, output.left - 1))
            accepted, right = verifier.verify(prefix, drafts, output.left)
            drafter.crop(len(prefix) + right)
            output.extend(accepted)
        output.forwards = verifier.forwards
        output.draft_forwards = drafter.forwards
        outputs.append(output)
    return outputs


class Drafter:
    """Proposes tokens for one sequence with the draft network."""

    def __init__(self, reader: Reader, window: MaskWindow, stop_ids: frozenset[int], mask_id: int) -> None:
        self._reader = reader
        self._window = window
        self._stop_ids = stop_ids
        self._mask_id = mask_id

    @property
    def forwards(self) -> int:
        """Forwards of the network so far."""
        return self._reader.forwards

    def crop(self, length: int) -> None:
        """Crop the cache to the first `length` tokens."""
        self._reader.crop(length)

    def propose(self, prefix: list[int], length: int) -> list[int]:
        """Return `length` tokens to follow `prefix`, fewer behind which the answer would end."""
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

    @property
    def forwards(self) -> int:
        """Forwards of the network so far."""
        return self._reader.forwards

    def verify(self, prefix: list[int], drafts: list[int], room: int) -> tuple[list[int], int]:
        """Return the tokens that follow `prefix`, of which `room` are wanted, and how many of them were drafted."""
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
        # Wrong drafts and all masks stand behind the right drafts.
        self._reader.crop(len(prefix) + right)
        if masks:
            group = outcomes + right * masks
            window_WV = torch.cat([logits_MV[right : right + 1], logits_MV[group : group + masks]])
            accepted[right:] = self._window.accept(window_WV)
        return accepted, right


@dataclass(frozen=True, slots=True)
class MaskGroups:
    """Slots of a verifying forward: the prefix, the drafts, and behind them the masks of group 0, of group 1, ...

    There are `outcomes` - 1 drafts and `outcomes` groups of `masks` each.
    """

    prefix: int
    outcomes: int
    masks: int

    @property
    def _tokens(self) -> int:
        return self.prefix + self.outcomes - 1

    def positions(self) -> list[int]:
        """Return the position of every slot: group j goes on behind the first j drafts."""
        behind = [self.prefix + group + mask for group in range(self.outcomes) for mask in range(self.masks)]
        return [*range(self._tokens), *behind]

    def visible(self, cached: int) -> Tensor:
        """Return which slots each slot from `cached` on sees: bool [Q, S]."""
        slot_S = torch.arange(self._tokens + self.outcomes * self.masks)
        # Tokens are group -1 and see tokens alone, for all masks stand behind them.
        group_S = torch.where(slot_S < self._tokens, -1, (slot_S - self._tokens) // self.masks)
        sees_tokens_S = torch.where(group_S < 0, self._tokens, self.prefix + group_S)
        slot_Q1, group_Q1, sees_tokens_Q1 = (each[cached:, None] for each in (slot_S, group_S, sees_tokens_S))
        own_or_token_QS = (group_S == group_Q1) | (slot_S < sees_tokens_Q1)
        return own_or_token_QS & (slot_S <= slot_Q1)
