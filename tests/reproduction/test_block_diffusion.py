"""Block diffusion: streams and mask by hand, training that sees what decoding asks, decoding against a slow twin."""

from itertools import accumulate, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from mars_ray.errors import ConfigError
from mars_ray.method.logits import logits_at
from mars_ray.method.streams import IGNORE, PADDING, PackedRows
from pipelines.reproduction.baselines.block_diffusion import decode_block_diffusion, diffusion_loss
from pipelines.reproduction.baselines.diffusion_streams import DiffusionStreams, diffusion_mask, diffusion_streams
from pipelines.reproduction.baselines.output import BaselineOutput
from tests.factories.token_rows import MASK_ID, VOCABULARY, packed

STOP_ID = 62
examples = st.lists(st.booleans(), min_size=1, max_size=12)
layouts = st.lists(st.lists(examples, min_size=1, max_size=3), min_size=1, max_size=2)
blocks = st.integers(1, 5)
seeds = st.integers(0, 99)
prompt = st.lists(st.integers(0, MASK_ID - 1), min_size=1, max_size=9)


def streams_of(rows: PackedRows, block: int, seed: int) -> DiffusionStreams:
    generator = torch.Generator().manual_seed(seed)
    return diffusion_streams(rows, block=block, mask_id=MASK_ID, stop_id=STOP_ID, generator=generator)


def whole_blocks(layout: list, rows: PackedRows, block: int) -> list[list[tuple[int, int, list[int], int]]]:
    """For each row, its blocks with a response: example, number, tokens when clean, where the response begins."""
    found = []
    for r, row in enumerate(layout):
        start, of_row = 0, []
        for e, marks in enumerate(row):
            for number in range(-(-len(marks) // block)):
                tokens: list[int] = []
                begin = end = None
                for position in range(number * block, (number + 1) * block):
                    responds = position < len(marks) and marks[position]
                    if begin is None and responds:
                        begin = position - number * block
                    if begin is not None and end is None and not responds:
                        end = position
                    in_reach = position < len(marks) and end is None
                    tokens.append(int(rows.tokens_RT[r, start + position]) if in_reach else STOP_ID)
                if begin is not None:
                    of_row.append((e, number, tokens, begin))
            start += len(marks)
        found.append(of_row)
    return found


@given(layout=layouts, block=blocks, seed=seeds)
def test_noisy_blocks_are_whole_and_end_in_stop_tokens(layout: list, block: int, seed: int) -> None:
    rows = packed(layout)
    streams = streams_of(rows, block, seed)
    T = rows.tokens_RT.shape[1]
    assert torch.equal(streams.tokens_RS[:, -T:], rows.tokens_RT)
    assert torch.equal(streams.position_RS[:, -T:], rows.position_RT)
    for r, of_row in enumerate(whole_blocks(layout, rows, block)):
        slot, labels = 0, set()
        origin = [0, *accumulate(map(len, layout[r]))]
        for example, number, tokens, begin in of_row:
            masks = 0
            for inside, token in enumerate(tokens):
                masked = int(streams.tokens_RS[r, slot]) == MASK_ID
                masks += masked
                assert masked or int(streams.tokens_RS[r, slot]) == token
                before = slot - 1 if inside else streams.tokens_RS.shape[1] - T + origin[example] + number * block - 1
                if masked and number * block + inside > 0:
                    assert int(streams.label_RS[r, before]) == token
                    assert 1 <= float(streams.weight_RS[r, before]) <= block * 1.001
                    labels.add(before)
                assert bool(streams.response_RS[r, slot]) == (inside >= begin)
                assert not masked or inside >= begin
                assert int(streams.example_RS[r, slot]) == example
                assert int(streams.block_RS[r, slot]) == number
                assert int(streams.position_RS[r, slot]) == number * block + inside
                slot += 1
            assert masks >= 1
        assert (streams.example_RS[r, slot:-T] == PADDING).all()
        assert set((streams.label_RS[r] != IGNORE).nonzero().flatten().tolist()) == labels
        assert not streams.response_RS[r, slot:].any()


def test_the_weight_is_one_over_the_share_of_masks() -> None:
    rows = packed([[[True] * 16000]])
    streams = streams_of(rows, 4000, 5)
    for number in range(4):
        # The last slot of a block predicts nothing: what is behind it belongs to the next.
        cut = slice(number * 4000, (number + 1) * 4000 - 1)
        labelled = streams.label_RS[0, cut] != IGNORE
        [weight] = streams.weight_RS[0, cut][labelled].unique().tolist()
        assert 1 / weight == pytest.approx(float(labelled.float().mean()), abs=0.02)


def sees_by_hand(streams: DiffusionStreams, r: int, q: int, k: int) -> bool:
    if streams.example_RS[r, q] != streams.example_RS[r, k]:
        return False
    query_block, key_block = int(streams.block_RS[r, q]), int(streams.block_RS[r, k])
    if streams.noisy_RS[r, q]:
        return query_block == key_block if streams.noisy_RS[r, k] else key_block < query_block
    return not streams.noisy_RS[r, k] and key_block <= query_block


@given(layout=layouts, block=blocks, seed=seeds)
def test_the_mask_is_the_table_of_the_docstring(layout: list, block: int, seed: int) -> None:
    streams = streams_of(packed(layout), block, seed)
    mask = diffusion_mask(streams)
    R, S = streams.tokens_RS.shape
    for r, q, k in product(range(R), range(S), range(S)):
        assert bool(mask[r, 0, q, k]) == sees_by_hand(streams, r, q, k)


def plain_logits(network: PreTrainedModel, ids: list[int], block: int) -> torch.Tensor:
    """One forward over everything, each block seeing itself and those before it: [S, V]."""
    visible = torch.tensor([[k // block <= q // block for k in range(len(ids))] for q in range(len(ids))])
    with torch.no_grad():
        logits_SV = network(input_ids=torch.tensor([ids]), attention_mask=visible[None, None], use_cache=False).logits[
            0
        ]
    logits_SV[:, MASK_ID] = -torch.inf
    return logits_SV


@given(marks=examples, block=blocks, seed=seeds)
def test_training_sees_exactly_what_decoding_will_ask(
    exact_network: PreTrainedModel, marks: list[bool], block: int, seed: int
) -> None:
    rows = packed([[marks]])
    streams = streams_of(rows, block, seed)
    with torch.no_grad():
        logits_SV = logits_at(
            exact_network,
            torch.ones_like(streams.noisy_RS),
            input_ids=streams.tokens_RS,
            position_ids=streams.position_RS,
            attention_mask=diffusion_mask(streams),
        )
    logits_SV[:, MASK_ID] = -torch.inf
    clean = rows.tokens_RT[0].tolist()
    for first in range(0, streams.tokens_RS.shape[1] - len(clean), block):
        start = int(streams.position_RS[0, first])
        noisy = streams.tokens_RS[0, first : first + block].tolist()
        expected = plain_logits(exact_network, clean[:start] + noisy, block)
        torch.testing.assert_close(logits_SV[first : first + block], expected[start:], rtol=1e-4, atol=1e-4)
        if start:
            before = len(logits_SV) - len(clean) + start - 1
            torch.testing.assert_close(logits_SV[before], expected[start - 1], rtol=1e-4, atol=1e-4)


@given(layout=layouts, block=blocks, seed=seeds)
def test_the_loss_is_the_weighted_mean_at_the_masks(
    exact_network: PreTrainedModel, layout: list, block: int, seed: int
) -> None:
    rows = packed(layout)
    streams = streams_of(rows, block, seed)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        loss = diffusion_loss(exact_network, rows, block=block, mask_id=MASK_ID, stop_id=STOP_ID, generator=generator)
        logits_RSV = exact_network(
            input_ids=streams.tokens_RS,
            position_ids=streams.position_RS,
            attention_mask=diffusion_mask(streams),
            use_cache=False,
        ).logits
    total = 0.0
    for r, s in (streams.label_RS != IGNORE).nonzero().tolist():
        total += float(streams.weight_RS[r, s] * F.cross_entropy(logits_RSV[r, s], streams.label_RS[r, s]))
    assert float(loss) == pytest.approx(total / max(1, int(streams.response_RS.sum())), rel=1e-4)


def slow_twin(
    network: PreTrainedModel, prompt: list[int], block: int, threshold: float, answer: BaselineOutput
) -> BaselineOutput:
    """Without a cache, block after block to its end; the answer is cut out when all is done."""
    ids = list(prompt)
    forwards_at = []
    while len(ids) < len(prompt) + answer.max_tokens:
        start = len(ids) // block * block
        ids += [MASK_ID] * (start + block - len(ids))
        while MASK_ID in ids:
            p_SV = plain_logits(network, ids, block).float().softmax(dim=-1)
            masks = [slot for slot, token in enumerate(ids) if token == MASK_ID]
            best = max(masks, key=lambda slot: float(p_SV[slot - 1].max()))
            for slot in masks:
                if slot == best or (threshold < 1 and float(p_SV[slot - 1].max()) >= threshold):
                    ids[slot] = int(p_SV[slot - 1].argmax())
            forwards_at.append(list(ids))
    answer.extend(ids[len(prompt) :])
    needed = len(prompt) + len(answer.tokens)
    answer.forwards = next(n for n, at in enumerate(forwards_at, start=1) if MASK_ID not in [*at, MASK_ID][:needed])
    return answer


@given(
    prompts=st.lists(prompt, max_size=2),
    block=blocks,
    threshold=st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]),
    max_tokens=st.integers(1, 14),
    stop_ids=st.frozensets(st.integers(0, MASK_ID - 1), max_size=6),
)
def test_decoding_with_a_cache_is_decoding_without(
    exact_network: PreTrainedModel,
    prompts: list[list[int]],
    block: int,
    threshold: float,
    max_tokens: int,
    stop_ids: frozenset[int],
) -> None:
    answers = decode_block_diffusion(
        exact_network,
        prompts,
        block=block,
        threshold=threshold,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        mask_id=MASK_ID,
    )
    expected = [
        slow_twin(exact_network, each, block, threshold, BaselineOutput(max_tokens, stop_ids)) for each in prompts
    ]
    assert answers == expected


def test_a_forward_reads_one_block_and_the_one_that_was_just_finished(exact_network: PreTrainedModel) -> None:
    read = []
    hook = exact_network.register_forward_pre_hook(
        lambda _module, _args, inputs: read.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    how: dict[str, Any] = {"block": 4, "max_tokens": 10, "stop_ids": frozenset(), "mask_id": MASK_ID}
    try:
        decode_block_diffusion(exact_network, [[1, 2, 3, 4, 5, 6]], threshold=1.0, **how)
        assert read == [8, 5, 9, 5, 5, 5, 9, 5, 5, 5]
        read.clear()
        decode_block_diffusion(exact_network, [[1, 2, 3, 4, 5, 6]], threshold=0.0, **how)
        assert read == [8, 9, 9]
    finally:
        hook.remove()


def test_a_trained_network_says_what_it_learned_and_stops_there() -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 96}
    network = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    answers = {(1, 2, 3): [11, 12, 13, 14, 15, STOP_ID], (4, 5, 6, 7): [21, 22, 23, 24, 25, 26, 27, STOP_ID]}
    rows = packed([[[False] * len(asked) + [True] * len(said)] for asked, said in answers.items()])
    for row, (asked, said) in enumerate(answers.items()):
        rows.tokens_RT[row, : len(asked) + len(said)] = torch.tensor([*asked, *said])
    losses = []
    for _ in range(300):
        loss = diffusion_loss(network, rows, block=4, mask_id=MASK_ID, stop_id=STOP_ID, generator=generator)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10])
    decoded = decode_block_diffusion(
        network.eval(),
        list(answers),
        block=4,
        threshold=0.5,
        max_tokens=20,
        stop_ids=frozenset({STOP_ID}),
        mask_id=MASK_ID,
    )
    assert [each.tokens for each in decoded] == list(answers.values())
    assert all(each.finish_reason == "stop" and each.forwards < len(each.tokens) for each in decoded)


def test_values_out_of_range_are_refused(exact_network: PreTrainedModel) -> None:
    how: dict[str, Any] = {"max_tokens": 4, "stop_ids": frozenset(), "mask_id": MASK_ID}
    with pytest.raises(ConfigError, match="block is 0"):
        decode_block_diffusion(exact_network, [], block=0, threshold=0.5, **how)
    with pytest.raises(ConfigError, match=r"threshold is 1\.5"):
        decode_block_diffusion(exact_network, [], block=2, threshold=1.5, **how)
