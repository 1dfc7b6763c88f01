"""Decode with the paper's batch decoder and block-level key-value cache, a baseline for the engine.

All rows fill one block of `cache_block` tokens together (arXiv 2604.07023, section 3.3). No row runs ahead of the
batch; the benchmark measures what this costs. A step forwards the last token before the block, which predicts the
block's first token, and then the block: the tokens a row has so far, then masks. After the step the cache is cropped to
the tokens before the block. A row whose block is full idles until all blocks are full; a finished row idles to the end.

Two simplifications favour the paper. Masks after the furthest window are not forwarded, because attention is causal and
nothing reads them. The prompt, or a full block, enters the cache with the first step of the next block instead of in a
forward of its own.

Prompts are padded on the left to one length, so position t of every row's output is in the same slot.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from mars_ray.errors import ConfigError
from mars_ray.method.acceptance import accepted_lengths, confidence
from mars_ray.method.metric import accepts_nothing
from mars_ray.method.reference import DecodedSequence, DecodeOptions


class Replay(Protocol):
    """Recorded proposals of one sequence, which replace those of a network with random weights."""

    def proposals(self, generated: int, window: int) -> tuple[list[int], list[float]]:
        """Return the `window` tokens proposed after `generated` tokens, and their confidences."""


@torch.inference_mode()
def decode_block_cache(
    network: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    *,
    mask_id: int,
    cache_block: int,
    script: Sequence[Replay] | None = None,
    lengths: Sequence[int] | None = None,
) -> list[DecodedSequence]:
    """Decode a static batch greedily; a row's `forwards` are the steps in which it did not idle.

    A row's window ends where its block ends, so with a threshold below 1 its tokens may differ from the reference's.
    The mask token is generated only if `script`, with one entry per prompt, proposes it. `lengths` are the most tokens
    of each row, by default `options.max_tokens`. Prompts must not be empty.
    """
    if cache_block < 1:
        raise ConfigError(f"cache_block is {cache_block}; it must be at least 1.")
    results = [DecodedSequence() for _ in prompts]
    if not prompts:
        return results
    lengths = lengths or [options.max_tokens] * len(prompts)
    batch = _StaticBatch(network, prompts, max(lengths), mask_id)
    for start in range(0, max(lengths), cache_block):
        ends = [min(start + cache_block, length) for length in lengths]
        while rows := [row for row, result in enumerate(results) if _can_grow(result, ends[row])]:
            # Every step forwards the token before the block, which predicts its first, so crop that token too.
            batch.crop(start - 1)
            _step(batch, rows, results, ends, options, script)
        batch.crop(start)
        if not any(_can_grow(result, length) for result, length in zip(results, lengths, strict=True)):
            break
    return results


def _can_grow(result: DecodedSequence, end: int) -> bool:
    return result.finish_reason != "stop" and len(result.tokens) < end


def _step(
    batch: "_StaticBatch",
    rows: list[int],
    results: list[DecodedSequence],
    ends: Sequence[int],
    options: DecodeOptions,
    script: Sequence[Replay] | None,
) -> None:
    """Run one forward and extend `rows`, none of them beyond its number of tokens in `ends`."""
    full = max(ends)
    generated = [len(results[row].tokens) for row in rows]
    alone = options.mode == "ar" or accepts_nothing(options.threshold, options.metric)
    window = 1 if alone else min(options.block, full - min(generated))
    logits_RWV = batch.window_logits(rows, generated, window, full)
    token_RW = logits_RWV.argmax(dim=-1)
    confidence_RW = confidence(logits_RWV, options.metric)
    if script is not None:
        proposed = [script[row].proposals(number, window) for row, number in zip(rows, generated, strict=True)]
        token_RW = torch.tensor([tokens for tokens, _ in proposed])
        confidence_RW = torch.tensor([confidences for _, confidences in proposed])
    threshold_R = torch.full((len(rows),), options.threshold, device=confidence_RW.device)
    accepted_R = accepted_lengths(confidence_RW, threshold_R, options.metric)
    for row, tokens, confidences, accepted in zip(
        rows, token_RW.tolist(), confidence_RW.tolist(), accepted_R.tolist(), strict=True
    ):
        result = results[row]
        accepted = min(accepted, ends[row] - len(result.tokens))
        stops = (count for count, token in enumerate(tokens[:accepted], start=1) if token in options.stop_ids)
        stop = next(stops, None)
        if stop is not None:
            accepted = stop
            result.finish_reason = "stop"
        batch.write(row, len(result.tokens), tokens[:accepted])
        result.tokens += tokens[:accepted]
        result.confidences += confidences[:accepted]
        result.forwards += 1


class _StaticBatch:
    """The token slots of a batch, and the cache of those already forwarded."""

    def __init__(self, network: PreTrainedModel, prompts: Sequence[Sequence[int]], room: int, mask_id: int) -> None:
        self._network = network
        self._mask_id = mask_id
        self._prompt = max(map(len, prompts))
        padding = [self._prompt - len(prompt) for prompt in prompts]
        self._ids_RS = torch.tensor(
            [[mask_id] * pad + [*prompt] + [mask_id] * room for pad, prompt in zip(padding, prompts, strict=True)],
            device=network.device,
        )
        padding_R1 = torch.tensor(padding, device=network.device)[:, None]
        position_RS = torch.arange(self._ids_RS.shape[1], device=network.device) - padding_R1
        self._real_RS = (position_RS >= 0).long()
        self._position_RS = position_RS.clamp(min=0)
        self._cache = DynamicCache()

    def write(self, row: int, generated: int, tokens: list[int]) -> None:
        start = self._prompt + generated
        self._ids_RS[row, start : start + len(tokens)] = torch.tensor(tokens, device=self._ids_RS.device)

    def crop(self, generated: int) -> None:
        """Crop the cache to the prompt and `generated` tokens; -1 drops the last token of the prompt."""
        self._cache.crop(min(0, self._prompt + generated - self._cache.get_seq_length()))

    def window_logits(self, rows: list[int], generated: list[int], window: int, full: int) -> Tensor:
        """Forward all rows, idle ones too; return the logits of the windows of `rows`: [R, W, V]."""
        cached = self._cache.get_seq_length()
        # The token in slot t predicts the one in slot t + 1, so the last slot of a block is not forwarded.
        end = self._prompt - 1 + min(max(generated) + window, full)
        first_R1 = torch.tensor(generated, device=self._ids_RS.device)[:, None] + self._prompt - 1 - cached
        place_RW = (first_R1 + torch.arange(window, device=first_R1.device)).clamp(max=end - 1 - cached)
        row_R1 = torch.tensor(rows, device=first_R1.device)[:, None]

        def pick(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            return (args[0][row_R1, place_RW],)

        hook = self._network.get_output_embeddings().register_forward_pre_hook(pick)
        try:
            logits_RWV: Tensor = self._network(
                input_ids=self._ids_RS[:, cached:end],
                attention_mask=self._real_RS[:, :end],
                position_ids=self._position_RS[:, cached:end],
                past_key_values=self._cache,
                use_cache=True,
            ).logits
        finally:
            hook.remove()
        # On a CPU argmax in float32 is four times as fast as in bfloat16.
        logits_RWV = logits_RWV.float()
        logits_RWV[..., self._mask_id] = -torch.inf
        return logits_RWV
