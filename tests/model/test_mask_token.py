import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM, PreTrainedModel

from mars_ray.model.mask_token import MASK_TOKEN, ensure_mask_token
from tests.factories.networks import tiny_network
from tests.factories.tokenizers import tiny_tokenizer
from tests.model.model_samples import ARCHITECTURES, logits_of

every_network = pytest.mark.parametrize(
    ("architecture", "tied"), [(name, tied) for name in ARCHITECTURES for tied in (True, False)]
)


def tables(network: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        network.get_input_embeddings().weight.detach().clone(),
        network.get_output_embeddings().weight.detach().clone(),
    )


@every_network
def test_a_spare_row_is_taken_and_no_other_row_changes(architecture: str, tied: bool) -> None:
    network, tokenizer = tiny_network(architecture, vocab_size=320, tie_word_embeddings=tied), tiny_tokenizer()
    before = tables(network)
    assert ensure_mask_token(network, tokenizer) == 300
    others = [row for row in range(320) if row != 300]
    for old, new in zip(before, tables(network), strict=True):
        assert new.shape == old.shape
        assert torch.equal(new[others], old[others])
        torch.testing.assert_close(new[300], old[:300].mean(dim=0))


@every_network
def test_without_a_spare_row_the_network_grows_and_no_old_row_changes(architecture: str, tied: bool) -> None:
    network, tokenizer = tiny_network(architecture, vocab_size=300, tie_word_embeddings=tied), tiny_tokenizer()
    before, logits = tables(network), logits_of(network)
    assert ensure_mask_token(network, tokenizer) == 300
    for old, new in zip(before, tables(network), strict=True):
        assert new.shape == (304, 32)
        assert torch.equal(new[:300], old)
        torch.testing.assert_close(new[300:], old.mean(dim=0).expand(4, -1))
    assert network.config.vocab_size == 304
    assert network.config.tie_word_embeddings is tied
    assert torch.equal(logits_of(network)[..., :300], logits)


def test_the_output_bias_grows_with_the_table() -> None:
    torch.manual_seed(0)
    config = PhiConfig(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    network = PhiForCausalLM(config)
    torch.nn.init.normal_(network.lm_head.bias)
    before = network.lm_head.bias.detach().clone()
    ensure_mask_token(network, tiny_tokenizer())
    assert torch.equal(network.lm_head.bias[:300], before)
    torch.testing.assert_close(network.lm_head.bias[300:], before.mean().expand(4))


def test_the_token_is_special_and_encodes_to_its_id() -> None:
    tokenizer = tiny_tokenizer()
    mask_id = ensure_mask_token(tiny_network(), tokenizer)
    assert tokenizer.mask_token == MASK_TOKEN
    assert tokenizer(f"one{MASK_TOKEN}").input_ids[-1] == mask_id
    assert tokenizer.decode([mask_id], skip_special_tokens=True) == ""


def test_a_second_call_changes_nothing() -> None:
    network, tokenizer = tiny_network(), tiny_tokenizer()
    mask_id = ensure_mask_token(network, tokenizer)
    with torch.no_grad():
        network.get_input_embeddings().weight[mask_id] = 3.0  # trained since
    before = tables(network)
    assert ensure_mask_token(network, tokenizer) == mask_id
    assert len(tokenizer) == 301
    assert all(torch.equal(old, new) for old, new in zip(before, tables(network), strict=True))


def test_a_mask_token_of_another_name_is_used_as_it_is() -> None:
    network, tokenizer = tiny_network(), tiny_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    before = tables(network)
    assert ensure_mask_token(network, tokenizer) == 300
    assert MASK_TOKEN not in tokenizer.get_vocab()
    assert all(torch.equal(old, new) for old, new in zip(before, tables(network), strict=True))


def test_a_vocabulary_that_holds_the_token_names_it_the_mask_token() -> None:
    network, tokenizer = tiny_network(), tiny_tokenizer()
    tokenizer.add_tokens(["<extra>", MASK_TOKEN])
    before = tables(network)
    assert ensure_mask_token(network, tokenizer) == 301
    assert (tokenizer.mask_token, len(tokenizer)) == (MASK_TOKEN, 302)
    assert all(torch.equal(old, new) for old, new in zip(before, tables(network), strict=True))


def test_a_known_mask_token_without_a_row_gets_one() -> None:
    network, tokenizer = tiny_network(vocab_size=300), tiny_tokenizer()
    tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    old, _ = tables(network)
    assert ensure_mask_token(network, tokenizer) == 300
    torch.testing.assert_close(tables(network)[0][300], old.mean(dim=0))


def test_rows_of_a_half_precision_network_keep_their_dtype() -> None:
    network = tiny_network().to(torch.bfloat16)
    old, _ = tables(network)
    ensure_mask_token(network, tiny_tokenizer())
    new, _ = tables(network)
    assert new.dtype == torch.bfloat16
    assert torch.equal(new[300], old[:300].float().mean(dim=0).to(torch.bfloat16))
