"""Medusa heads: their labels and loss by hand, their training, and decoding with them against the reference."""

from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from mars_ray.errors import ConfigError, DivergedError, ModelError
from mars_ray.method.reference import DecodeOptions, decode
from mars_ray.method.streams import IGNORE, PackedRows
from mars_ray.model.checkpoint import Checkpoint
from pipelines.reproduction.baselines.medusa import MedusaHeads, decode_medusa, head_labels, hidden_at, train_heads
from tests.factories.token_rows import MASK_ID, packed

prompt = st.lists(st.integers(0, MASK_ID - 1), min_size=1, max_size=9)
examples = st.lists(st.booleans(), min_size=1, max_size=10)
layouts = st.lists(st.lists(examples, min_size=1, max_size=3), min_size=1, max_size=2)


def new_heads(heads: int, network: PreTrainedModel) -> MedusaHeads:
    return MedusaHeads(heads, network.get_output_embeddings().weight)


def random_heads(heads: int, network: PreTrainedModel, scale: float) -> MedusaHeads:
    torch.manual_seed(3)
    made = new_heads(heads, network)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(std=scale)
    return made


@given(
    prompts=st.lists(prompt, max_size=3),
    heads=st.integers(1, 5),
    scale=st.sampled_from([0.0, 0.5]),
    max_tokens=st.integers(1, 20),
    stop_ids=st.frozensets(st.integers(0, MASK_ID - 1), max_size=6),
)
def test_whatever_the_heads_say_the_tokens_are_those_of_autoregressive_decoding(
    exact_network: PreTrainedModel,
    prompts: list[list[int]],
    heads: int,
    scale: float,
    max_tokens: int,
    stop_ids: frozenset[int],
) -> None:
    made = random_heads(heads, exact_network, scale)
    answers = decode_medusa(exact_network, made, prompts, max_tokens=max_tokens, stop_ids=stop_ids, mask_id=MASK_ID)
    options = DecodeOptions(mode="ar", max_tokens=max_tokens, stop_ids=stop_ids)
    expected = decode(exact_network, prompts, options, mask_id=MASK_ID)
    assert [(a.tokens, a.finish_reason) for a in answers] == [(e.tokens, e.finish_reason) for e in expected]


def test_right_guesses_of_all_heads_are_taken_in_one_forward(repeating_network: PreTrainedModel) -> None:
    """New heads say what the network says, which here is always the same token."""
    (answer,) = decode_medusa(
        repeating_network,
        new_heads(3, repeating_network),
        [[5, 9]],
        max_tokens=9,
        stop_ids=frozenset(),
        mask_id=MASK_ID,
    )
    assert (answer.tokens, answer.forwards) == ([9] * 9, 3)


def test_a_new_head_says_what_the_network_says(network: PreTrainedModel) -> None:
    rows = packed([[[False] * 4 + [True] * 6], [[True] * 10]])
    where_RT = rows.response_RT
    heads = new_heads(2, network)
    with torch.no_grad():
        logits_KMV = heads(hidden_at(network, rows, where_RT))
        expected_MV = network(input_ids=rows.tokens_RT, use_cache=False).logits[where_RT]
    for logits_MV in logits_KMV:
        torch.testing.assert_close(logits_MV, expected_MV, rtol=1e-4, atol=1e-4)


@given(layout=layouts, heads=st.integers(1, 4))
def test_a_head_is_labelled_with_the_token_ahead_within_one_response(layout: list, heads: int) -> None:
    rows = packed(layout)
    label_KRT = head_labels(rows, heads)
    R, T = rows.tokens_RT.shape
    for k, r, t in product(range(heads), range(R), range(T)):
        way = range(t + 1, t + k + 3)
        counts = way[-1] < T and all(
            rows.response_RT[r, p] and rows.example_RT[r, p] == rows.example_RT[r, t] for p in way
        )
        assert int(label_KRT[k, r, t]) == (int(rows.tokens_RT[r, way[-1]]) if counts else IGNORE)


@given(layout=layouts, heads=st.integers(1, 3))
def test_the_loss_is_the_mean_of_the_weighted_means_of_the_heads(
    network: PreTrainedModel, layout: list, heads: int
) -> None:
    rows = packed(layout)
    made = random_heads(heads, network, 0.5)
    hidden_MD = hidden_at(network, rows, torch.ones_like(rows.response_RT))
    label_KM = head_labels(rows, heads).flatten(1)
    with torch.no_grad():
        total = 0.0
        for k in range(heads):
            hidden = hidden_MD + F.silu(hidden_MD @ made.weight_KDD[k].T + made.bias_KD[k])
            if (label_KM[k] != IGNORE).any():
                total += 0.8 ** (k + 1) * float(
                    F.cross_entropy(hidden @ made.output_KVD[k].T, label_KM[k], ignore_index=IGNORE)
                )
        assert float(made.loss(hidden_MD, label_KM)) == pytest.approx(total / heads, rel=1e-4, abs=1e-5)


def test_training_teaches_the_heads_and_leaves_the_network_as_it_is(network: PreTrainedModel) -> None:
    before = deepcopy(network.state_dict())
    heads = new_heads(3, network)
    rows = packed([[[False] * 3 + [True] * 20], [[False] * 5 + [True] * 18]])
    losses = train_heads(network, heads, [rows] * 60, steps=50, learning_rate=0.03)
    assert len(losses) == 50
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(before[name], weight) for name, weight in network.state_dict().items())
    assert all(weight.grad is None for weight in network.parameters())


def test_heads_trained_on_the_answers_of_the_bundled_model_save_forwards(
    bundled: Checkpoint, bundled_prompts: list[list[int]]
) -> None:
    how: dict[str, Any] = {"max_tokens": 32, "stop_ids": bundled.stop_ids, "mask_id": bundled.mask_id}
    prompts = bundled_prompts[:3]
    new, trained = (new_heads(3, bundled.network) for _ in range(2))
    before = decode_medusa(bundled.network, new, prompts, **how)
    rows = rows_of([(prompt, answer.tokens) for prompt, answer in zip(prompts, before, strict=True)])
    train_heads(bundled.network, trained, [rows] * 12, steps=12, learning_rate=0.01)
    after = decode_medusa(bundled.network, trained, prompts, **how)
    options = DecodeOptions(mode="ar", max_tokens=32, stop_ids=bundled.stop_ids)
    expected = decode(bundled.network, prompts, options, mask_id=bundled.mask_id)
    assert [a.tokens for a in after] == [a.tokens for a in before] == [e.tokens for e in expected]
    assert sum(a.forwards for a in after) < 0.6 * sum(a.forwards for a in before)
    for prompt, answer in zip(prompts, after, strict=True):
        assert answer.forwards == forwards_by_hand(bundled.network, trained, prompt, answer.tokens, bundled.mask_id)


def forwards_by_hand(
    network: PreTrainedModel, heads: MedusaHeads, prompt: list[int], tokens: list[int], mask_id: int
) -> int:
    """How many it takes when the heads are asked where the network gave the last token that was taken."""
    row = rows_of([(prompt, tokens)])
    hidden_TD = hidden_at(network, row, torch.ones_like(row.response_RT))
    with torch.no_grad():
        logits_KTV = heads(hidden_TD)
    logits_KTV[..., mask_id] = -torch.inf
    guess_TK = logits_KTV.argmax(dim=-1).T.tolist()
    taken, forwards = 1, 1
    while taken < len(tokens):
        ahead = zip(guess_TK[len(prompt) + taken - 2], tokens[taken:], strict=False)
        taken += 1 + next((n for n, (guess, token) in enumerate(ahead) if guess != token), len(guess_TK[0]))
        forwards += 1
    return forwards


def rows_of(examples: list[tuple[list[int], list[int]]]) -> PackedRows:
    marks = [[[False] * len(prompt) + [True] * len(answer)] for prompt, answer in examples]
    rows = packed(marks)
    for row, (prompt, answer) in enumerate(examples):
        rows.tokens_RT[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
    return rows


def test_saved_heads_come_back_the_same(tmp_path: Path, network: PreTrainedModel) -> None:
    heads = random_heads(2, network, 0.5)
    heads.save(tmp_path / "heads.safetensors")
    loaded = MedusaHeads.load(tmp_path / "heads.safetensors", network)
    assert torch.equal(loaded.weight_KDD, heads.weight_KDD)
    assert torch.equal(loaded.bias_KD, heads.bias_KD)
    assert torch.equal(loaded.output_KVD, heads.output_KVD)


def test_a_file_that_holds_no_heads_for_this_network_is_refused(tmp_path: Path, network: PreTrainedModel) -> None:
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        MedusaHeads.load(tmp_path / "absent.safetensors", network)
    MedusaHeads(2, torch.zeros(9, 16)).save(tmp_path / "small.safetensors")
    with pytest.raises(ModelError, match="not heads for a network of hidden size 32"):
        MedusaHeads.load(tmp_path / "small.safetensors", network)


def test_no_heads_and_a_loss_that_is_not_finite_are_refused(network: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="heads is 0"):
        new_heads(0, network)
    heads = random_heads(1, network, float("inf"))
    with pytest.raises(DivergedError, match="the loss of the heads"):
        train_heads(network, heads, [packed([[[True] * 9]])], steps=1, learning_rate=0.1)
