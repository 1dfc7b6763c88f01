"""Networks of random weights: the size asked for, the same every time, exact where rotary embeddings are."""

import pytest
import torch

from benchmarks.decode.shapes import SIZES, resolve_shape
from mars_ray.errors import ConfigError


def test_shape_100m_has_about_100_million_parameters_in_bfloat16_and_keeps_its_rotary_frequencies_exact() -> None:
    state = torch.random.get_rng_state()
    network = resolve_shape("shape:100m")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert 95e6 < network.num_parameters() < 110e6
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
    frequencies = network.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, 1e6 ** -(torch.arange(0, 64, 2) / 64))
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight
    assert not network.training


def test_the_weights_are_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    monkeypatch.setitem(SIZES, "shape:tiny", tiny | heads)
    one, other = (resolve_shape("shape:tiny", dtype=torch.float32).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown shape 'shape:7b'; choose one of shape:100m, shape:0.5b\."):
        resolve_shape("shape:7b")
