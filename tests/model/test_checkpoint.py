import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from mars_ray.errors import ModelError, OutputError
from mars_ray.model import checkpoint as checkpoint_module
from mars_ray.model.card import Card
from mars_ray.model.checkpoint import load_checkpoint, save_checkpoint
from tests.factories.networks import tiny_network
from tests.model.model_samples import ARCHITECTURES, PROMPT, MakeFolder, edit_json, logits_of

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)
tied_and_untied = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_loading_gives_the_network_of_the_folder_in_eval_mode(make_model_folder: MakeFolder) -> None:
    checkpoint = load_checkpoint(make_model_folder(mask=True))
    assert torch.equal(logits_of(checkpoint.network), logits_of(tiny_network()))
    assert not checkpoint.network.training
    assert checkpoint.card is None
    assert checkpoint.network.dtype == torch.float32


@every_architecture
@tied_and_untied
def test_a_round_trip_keeps_every_logit_and_every_id(
    make_model_folder: MakeFolder, tmp_path: Path, architecture: str, tied: bool
) -> None:
    checkpoint = load_checkpoint(make_model_folder(architecture, tied=tied))
    save_checkpoint(checkpoint, tmp_path / "out")
    again = load_checkpoint(tmp_path / "out")
    assert torch.equal(logits_of(again.network), logits_of(checkpoint.network))
    assert again.mask_id == checkpoint.mask_id == 300
    assert again.tokenizer.get_vocab() == checkpoint.tokenizer.get_vocab()
    assert again.tokenizer(PROMPT).input_ids == checkpoint.tokenizer(PROMPT).input_ids
    assert again.network.config.tie_word_embeddings is tied


@every_architecture
def test_a_saved_folder_opens_with_the_auto_classes(
    make_model_folder: MakeFolder, tmp_path: Path, mars_card: Card, architecture: str
) -> None:
    checkpoint = replace(load_checkpoint(make_model_folder(architecture)), card=mars_card)
    save_checkpoint(checkpoint, tmp_path / "out")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert torch.equal(logits_of(network), logits_of(checkpoint.network))
    assert tokenizer(PROMPT).input_ids == checkpoint.tokenizer(PROMPT).input_ids
    assert tokenizer.mask_token_id == checkpoint.mask_id
    assert names_in(tmp_path / "out") == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "mars.json",
    }
    assert load_checkpoint(tmp_path / "out").card == mars_card


def test_the_chat_template_is_saved_with_the_tokenizer(make_model_folder: MakeFolder, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_model_folder())
    checkpoint.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    save_checkpoint(checkpoint, tmp_path / "out")
    tokenizer = load_checkpoint(tmp_path / "out").tokenizer
    assert tokenizer.apply_chat_template([{"role": "user", "content": "one"}], tokenize=False) == "one"


@tied_and_untied
def test_saving_in_bfloat16_casts_the_file_and_not_the_network(
    make_model_folder: MakeFolder, tmp_path: Path, tied: bool
) -> None:
    checkpoint = load_checkpoint(make_model_folder(tied=tied))
    before = logits_of(checkpoint.network)
    save_checkpoint(checkpoint, tmp_path / "out", dtype=torch.bfloat16)
    assert checkpoint.network.dtype == torch.float32
    assert torch.equal(logits_of(checkpoint.network), before)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.bfloat16"}  # noqa: SIM118
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_checkpoint(tmp_path / "out", dtype=torch.bfloat16).network
    for name, tensor in checkpoint.network.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(torch.bfloat16)), name


def test_a_dtype_and_an_attention_can_be_asked_for(make_model_folder: MakeFolder) -> None:
    network = load_checkpoint(make_model_folder(), dtype=torch.bfloat16, attention="eager").network
    assert network.dtype == torch.bfloat16
    assert network.config._attn_implementation == "eager"


def test_shards_load_like_one_file(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder(mask=True, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert torch.equal(logits_of(load_checkpoint(folder).network), logits_of(tiny_network()))


def test_a_card_of_another_tokenizer_is_refused(make_model_folder: MakeFolder, tmp_path: Path, mars_card: Card) -> None:
    checkpoint = load_checkpoint(make_model_folder())
    card = mars_card.model_copy(update={"mask_token_id": 7})
    save_checkpoint(replace(checkpoint, card=card), tmp_path / "out")
    with pytest.raises(ModelError, match="id 7, the tokenizer says 300"):
        load_checkpoint(tmp_path / "out")


def test_weights_may_be_read_by_whom_the_umask_lets(make_model_folder: MakeFolder, tmp_path: Path) -> None:
    save_checkpoint(load_checkpoint(make_model_folder()), tmp_path / "copy")
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "copy").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_a_folder_in_use_is_never_written_to(make_model_folder: MakeFolder, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_model_folder())
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target in ("used", "file", "file/below"):
        with pytest.raises(OutputError, match=target):
            save_checkpoint(checkpoint, tmp_path / target)
    assert names_in(tmp_path / "used") == {"notes.txt"}


def test_an_empty_folder_and_one_below_missing_parents_are_written_to(
    make_model_folder: MakeFolder, tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(make_model_folder())
    (tmp_path / "empty").mkdir()
    for target in ("empty", "a/b/c"):
        save_checkpoint(checkpoint, tmp_path / target)
        assert "model.safetensors" in names_in(tmp_path / target)
    assert names_in(tmp_path / "a" / "b") == {"c"}


@pytest.mark.parametrize("failure", [RuntimeError("card"), OSError("disk full"), KeyboardInterrupt()])
def test_a_save_that_fails_midway_leaves_nothing(
    make_model_folder: MakeFolder,
    tmp_path: Path,
    mars_card: Card,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
) -> None:
    checkpoint = replace(load_checkpoint(make_model_folder()), card=mars_card)
    before = names_in(tmp_path)

    def fail(card: Card, folder: Path) -> None:
        assert "model.safetensors" in names_in(folder)
        raise failure

    monkeypatch.setattr(checkpoint_module, "write_card", fail)
    with pytest.raises(OutputError if isinstance(failure, OSError) else type(failure)):
        save_checkpoint(checkpoint, tmp_path / "out")
    assert names_in(tmp_path) == before


def test_an_output_table_that_differs_survives_a_config_that_says_tied(
    make_model_folder: MakeFolder, tmp_path: Path
) -> None:
    folder = make_model_folder(tied=False, rows=300)
    edit_json(folder / "config.json", tie_word_embeddings=True)
    checkpoint = load_checkpoint(folder)
    untied = tiny_network(tie_word_embeddings=False, vocab_size=300)
    assert checkpoint.network.get_input_embeddings().weight.shape[0] == 304
    assert torch.equal(logits_of(checkpoint.network)[..., :300], logits_of(untied))
    save_checkpoint(checkpoint, tmp_path / "out")
    assert torch.equal(logits_of(load_checkpoint(tmp_path / "out").network), logits_of(checkpoint.network))


def test_generation_settings_that_transformers_calls_invalid_do_not_stop_a_save(
    make_model_folder: MakeFolder, tmp_path: Path
) -> None:
    folder = make_model_folder()
    edit_json(folder / "generation_config.json", temperature=0.7, do_sample=False)
    if Version(transformers.__version__) < Version("5.23"):
        with pytest.raises(OutputError, match="GenerationConfig is invalid"):
            save_checkpoint(load_checkpoint(folder), tmp_path / "out")
        return
    save_checkpoint(load_checkpoint(folder), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.7
