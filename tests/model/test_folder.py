import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BartConfig, BertConfig, T5Config

from mars_ray.errors import ModelError, UnsafeModelError
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.folder import check_folder
from tests.model.model_samples import MakeFolder, edit_json


def test_a_sound_folder_is_described(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder("llama")
    found = check_folder(folder)
    assert (found.folder, found.config.model_type, found.tokenizer_is_custom) == (folder, "llama", False)


def test_a_missing_folder_is_named_with_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere does not exist. Expected a folder with config.json"):
        check_folder(tmp_path / "nowhere")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("")
    with pytest.raises(ModelError, match="weights is a file"):
        check_folder(tmp_path / "weights")


def test_a_folder_without_config_is_refused(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder()
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config.json"):
        check_folder(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[1]", "holds a JSON list"),
        (b"{}", "names no model_type"),
        (b'{"model_type": 3}', "names no model_type"),
        (b'{"model_type": "qwen99"}', "'qwen99' is not known to transformers"),
        (b'{"model_type": "qwen2", "hidden_size": "wide"}', "not a valid qwen2 configuration"),
        (b'{"model_type": "lfm2", "full_attn_idxs": [1]}', "'lfm2' has layers of the type conv"),
        (b'{"model_type": "qwen3_next"}', "'qwen3_next' has layers of the type linear_attention"),
        (b'{"model_type": "jamba"}', "'jamba' has layers of the type"),
        (b'{"model_type": "llama4_text"}', "'llama4_text' has layers of the type chunked_attention"),
    ],
)
def test_an_unusable_config_is_refused(make_model_folder: MakeFolder, content: bytes, reason: str) -> None:
    folder = make_model_folder()
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        check_folder(folder)


@pytest.mark.parametrize("config_class", [BertConfig, T5Config, BartConfig])
def test_encoders_and_encoder_decoders_are_refused(make_model_folder: MakeFolder, config_class: type) -> None:
    folder = make_model_folder()
    config_class().save_pretrained(folder)
    with pytest.raises(ModelError, match="not a decoder"):
        check_folder(folder)


def test_quantised_weights_and_adapters_are_refused(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder()
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match="quantised"):
        check_folder(folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    with pytest.raises(ModelError, match="adapter"):
        check_folder(folder)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pth", "model.ckpt"]
)
def test_pickled_weights_are_unsafe_and_the_message_says_how_to_convert(
    make_model_folder: MakeFolder, name: str
) -> None:
    folder = make_model_folder()
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(UnsafeModelError, match=rf"{name}.*Only safetensors.*save_pretrained"):
        check_folder(folder)


def test_a_pickle_beside_safetensors_is_left_alone(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder()
    (folder / "optimizer.pt").write_bytes(b"not even a pickle")
    check_folder(folder)


def test_a_folder_without_weights_is_refused(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder()
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(ModelError, match=r"other.safetensors but neither model.safetensors"):
        check_folder(folder)
    (folder / "other.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        check_folder(folder)


def test_the_shards_of_a_distributed_run_are_refused(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder()
    (folder / "shard-00000-model-00001-of-00001.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="distributed run"):
        check_folder(folder)


def test_a_missing_shard_is_named(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder(max_shard_size="20KB")
    shard = sorted(folder.glob("model-00002-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ModelError, match=rf"lacks 1 of the \d+ weight files.*{shard.name}"):
        check_folder(folder)


@pytest.mark.parametrize(
    ("index", "error"),
    [
        ({"weight_map": {"a": "../other/model.safetensors"}}, UnsafeModelError),
        ({"weight_map": {"a": "pytorch_model.bin"}}, UnsafeModelError),
        ({"weight_map": {}}, ModelError),
        ({}, ModelError),
    ],
)
def test_an_index_that_names_no_files_beside_it_is_refused(
    make_model_folder: MakeFolder, index: dict, error: type[Exception]
) -> None:
    folder = make_model_folder()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(error, match="index"):
        check_folder(folder)


@pytest.mark.parametrize("damage", ["cut", "noise", "empty"])
def test_a_corrupt_file_is_named(make_model_folder: MakeFolder, damage: str) -> None:
    folder = make_model_folder()
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes({"cut": whole[:-100], "noise": b"\x99" * 500, "empty": b""}[damage])
    with pytest.raises(ModelError, match=r"model.safetensors is not a complete safetensors file"):
        check_folder(folder)


def test_weights_missing_from_the_file_are_named_and_never_invented(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder()
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights.*model.layers.1.mlp.up_proj.weight"):
        load_checkpoint(folder)


def test_an_untied_output_table_missing_from_the_file_is_named(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder(tied=True)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lm_head.weight"):
        load_checkpoint(folder)


def test_weights_of_another_shape_are_refused(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder()
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"] = torch.ones(31)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="cannot be loaded as qwen2"):
        load_checkpoint(folder)


def test_a_folder_without_a_tokenizer_is_refused(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer: expected tokenizer.json"):
        check_folder(folder)


@pytest.mark.parametrize("content", ["{", "{}", '{"added_tokens": [], "model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_refused(make_model_folder: MakeFolder, content: str) -> None:
    folder = make_model_folder("llama")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        load_checkpoint(folder)
