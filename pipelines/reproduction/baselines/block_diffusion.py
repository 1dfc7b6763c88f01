"""Block diffusion: fills a block of masks in any order, with attention in both directions within the block.

The tokens differ from autoregressive decoding: this is another model with the same architecture.

Letters: M picked positions, Q slots that a forward reads, S all slots, V vocabulary.

Source: arXiv 2503.09573; accepting all tokens above a threshold: arXiv 2505.22618. The output at a position predicts
the next token, as in the autoregressive model that training starts from. Blocks are absolute, t // B: the first block
of an answer also holds the end of the prompt.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.errors import ConfigError
from mars_ray.method.acceptance import confidence
from mars_ray.method.logits import logits_at
from mars_ray.method.metric import Metric, accepts_nothing, passes
from mars_ray.method.streams import IGNORE, PackedRows
from pipelines.reproduction.baselines.diffusion_streams import diffusion_mask, diffusion_streams
from pipelines.reproduction.baselines.output import BaselineOutput
from pipelines.reproduction.baselines.reader import Reader


def diffusion_loss(
    network: PreTrainedModel,
    rows: PackedRows,
    *,
    block: int,
    mask_id: int,
    stop_id: int,
    generator: torch.Generator,
) -> Tensor:
    """Return the weighted cross-entropy at the masks, per token of the noisy responses, as a float32 scalar.

    `stop_id` fills the last block of a response after its end; `generator` must be a CPU generator.
    """
    streams = diffusion_streams(rows, block=block, mask_id=mask_id, stop_id=stop_id, generator=generator)
    streams = streams.to(network.device)
    masked_RS = streams.label_RS != IGNORE
    logits_MV = logits_at(
        network,
        masked_RS,
        input_ids=streams.tokens_RS,
        position_ids=streams.position_RS,
        attention_mask=diffusion_mask(streams),
    )
    loss_M = F.cross_entropy(logits_MV.float(), streams.label_RS[masked_RS], reduction="none")
    return (loss_M * streams.weight_RS[masked_RS]).sum() / streams.response_RS.sum().clamp(min=1)


@torch.inference_mode()
def decode_block_diffusion(
    network: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    block: int,
    threshold: float,
    max_tokens: int,
    stop_ids: frozenset[int],
    mask_id: int,
) -> list[BaselineOutput]:
    """Decode each prompt. A forward fills every mask whose top probability reaches the threshold, at least one.

    At threshold 1 a forward fills only the most certain mask. Two simplifications favour the method: A finished block
    enters the cache with the first forward of the next block, except for its last slot, which predicts the first token
    of the next block and is read in every forward. And an answer is finished once all masks before its stop token are
    filled. Prompts must not be empty.
    """
    if block < 1:
        raise ConfigError(f"block is {block}; it must be at least 1.")
    if not 0 <= threshold <= 1:
        raise ConfigError(f"threshold is {threshold}; it must be in 0..1.")
    outputs = []
    for prompt in prompts:
        output = BaselineOutput(max_tokens, stop_ids)
        reader = Reader(network, mask_id)
        ids = list(prompt)
        while not output.is_finished:
            start = len(ids) // block * block
            ids += [mask_id] * (start + block - len(ids))
            while mask_id in ids[start:] and not output.is_finished:
                _fill(ids, *_proposals(reader, ids, start, block), threshold, mask_id)
                reader.crop(max(0, start - 1))
                output.extend(_filled(ids, len(prompt) + len(output.tokens), mask_id))
        output.forwards = reader.forwards
        outputs.append(output)
    return outputs


def _proposals(reader: Reader, ids: list[int], start: int, block: int) -> tuple[int, list[int], list[float]]:
    """Forward the uncached slots. Return a position, and the top tokens and probabilities from there to the end.

    The position is the start of the last block, but at least 1, because nothing predicts the token at position 0.
    """
    first = max(start, 1)
    visible_QS = block_causal(reader.length, len(ids), block)
    logits_MV = reader.read(ids, last=len(ids) - first + 1, visible_QS=visible_QS).logits_MV[:-1]
    return first, logits_MV.argmax(dim=-1).tolist(), confidence(logits_MV, Metric.PROBABILITY).tolist()


def block_causal(cached: int, length: int, block: int) -> Tensor:
    """Return the slots that each slot from `cached` on sees, bool [Q, S]: its whole block and all earlier slots."""
    block_S = torch.arange(length) // block
    return block_S <= block_S[cached:, None]


def _fill(
    ids: list[int], first: int, tokens: list[int], certainties: list[float], threshold: float, mask_id: int
) -> None:
    """Replace the masks from `first` on that are certain enough, and always the most certain mask."""
    certainty_of = {slot: value for slot, value in enumerate(certainties, start=first) if ids[slot] == mask_id}
    best = max(certainty_of, key=certainty_of.__getitem__)
    for slot, certainty in certainty_of.items():
        sure = not accepts_nothing(threshold, Metric.PROBABILITY) and passes(certainty, threshold, Metric.PROBABILITY)
        if sure or slot == best:
            ids[slot] = tokens[slot - first]


def _filled(ids: list[int], first: int, mask_id: int) -> list[int]:
    """Return the tokens from `first` on, up to the first mask."""
    end = ids.index(mask_id, first) if mask_id in ids[first:] else len(ids)
    return ids[first:end]
