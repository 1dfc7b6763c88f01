"""Folders that bring code: it is never run, and the plain network under it loads where there is one."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mars_ray.errors import ModelError, UnsafeModelError
from mars_ray.model.checkpoint import load_checkpoint, save_checkpoint
from mars_ray.model.folder import check_folder
from tests.factories.networks import tiny_network
from tests.factories.tokenizers import tiny_tokenizer
from tests.model.model_samples import PROMPT, MakeFolder, edit_json, logits_of

AUTO_MAP = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}


def plant_code(folder: Path) -> Path:
    """Put code in `folder` that leaves a file when it runs, and return the path of that file."""
    ran = folder.parent / "ran"
    code = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nclass EvilConfig: ...\nclass EvilModel: ...\n"
    (folder / "evil.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code + "def generate(*a, **k): ...\n")
    return ran


def make_a2d(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="a2d-qwen2", architectures=["A2DQwen2LMHeadModel"], auto_map=AUTO_MAP)


def test_a_known_type_with_code_attached_loads_as_the_known_class(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder("llama", mask=True)
    ran = plant_code(folder)
    edit_json(folder / "config.json", auto_map=AUTO_MAP, architectures=["EvilModel"])
    network = load_checkpoint(folder).network
    assert type(network).__name__ == "LlamaForCausalLM"
    assert torch.equal(logits_of(network), logits_of(tiny_network("llama")))
    assert not ran.exists()
    assert "evil" not in " ".join(sys.modules)


def test_an_unknown_type_with_code_attached_is_unsafe(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder()
    ran = plant_code(folder)
    edit_json(folder / "config.json", model_type="evil", auto_map=AUTO_MAP)
    with pytest.raises(UnsafeModelError, match="'evil' needs the code that came with it"):
        load_checkpoint(folder)
    assert not ran.exists()


def test_a_checkpoint_of_the_mars_authors_loads_as_plain_qwen2(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder(mask=True)
    ran = plant_code(folder)
    make_a2d(folder)
    checkpoint = load_checkpoint(folder)
    assert type(checkpoint.network).__name__ == "Qwen2ForCausalLM"
    assert checkpoint.mask_id == 300
    assert torch.equal(logits_of(checkpoint.network), logits_of(tiny_network()))
    assert not ran.exists()


def test_a_checkpoint_of_the_mars_authors_is_saved_as_plain_qwen2(
    make_model_folder: MakeFolder, tmp_path: Path
) -> None:
    folder = make_model_folder(mask=True)
    make_a2d(folder)
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]})
    save_checkpoint(load_checkpoint(folder), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen2", ["Qwen2ForCausalLM"])
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        assert "auto_map" not in (tmp_path / "out" / name).read_text()
    assert not list((tmp_path / "out").glob("*.py"))
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits_of(network), logits_of(tiny_network()))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "phi3", "gemma2", "gemma3_text"])
@pytest.mark.parametrize(
    "claims",
    [
        {"auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}},
        {"auto_map": ["evil.EvilTokenizer", None]},
        {"auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}, "tokenizer_class": "EvilTokenizer"},
        {"tokenizer_class": "EvilTokenizer"},
        {"tokenizer_class": "AutoModelForCausalLM"},
        {"tokenizer_class": 5},
    ],
)
def test_a_custom_tokenizer_is_read_from_tokenizer_json(
    make_model_folder: MakeFolder, tmp_path: Path, architecture: str, claims: dict
) -> None:
    folder = make_model_folder(architecture)
    ran = plant_code(folder)
    edit_json(folder / "tokenizer_config.json", **claims)
    assert check_folder(folder).tokenizer_is_custom
    checkpoint = load_checkpoint(folder)
    assert checkpoint.tokenizer(PROMPT).input_ids == tiny_tokenizer()(PROMPT).input_ids
    save_checkpoint(checkpoint, tmp_path / "out")
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert saved(PROMPT).input_ids == checkpoint.tokenizer(PROMPT).input_ids
    assert not ran.exists()


def test_a_custom_tokenizer_without_tokenizer_json_is_unsafe(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder()
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "tokenizer_config.json", tokenizer_class="EvilTokenizer")
    with pytest.raises(UnsafeModelError, match="'EvilTokenizer' needs the code"):
        load_checkpoint(folder)


def test_a_config_cannot_choose_a_weight_file_or_a_kernel(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder(mask=True)
    edit_json(
        folder / "config.json",
        transformers_weights="adapter_model.bin",
        attn_implementation="someone/kernel",
        experts_implementation="someone/kernel",
        fusion_config={"patch_embeddings": True},
    )
    network = load_checkpoint(folder).network
    assert network.config._attn_implementation == "sdpa"
    assert torch.equal(logits_of(network), logits_of(tiny_network()))


@pytest.mark.parametrize(
    "name",
    [
        "auto_map", "trust_remote_code", "transformers_weights", "attn_implementation", "_attn_implementation_internal",
        "_experts_implementation", "_experts_implementation_internal", "use_kernels", "use_hub_kernels",
        "kernel_config", "fusion_config", "distributed_config", "custom_generate",
    ],
)  # fmt: skip
def test_nothing_that_may_name_code_stays_in_a_configuration_at_any_depth(
    make_model_folder: MakeFolder, name: str
) -> None:
    folder = make_model_folder()
    ran = plant_code(folder)
    hostile = {name: "someone/kernel"}
    edit_json(folder / "config.json", **hostile, part={"deeper": [hostile, {"deepest": hostile}], "kept": 1})
    network = load_checkpoint(folder).network
    assert network.config.part == {"deeper": [{}, {"deepest": {}}], "kept": 1}
    assert "someone" not in network.config.to_json_string()
    assert not ran.exists()


@pytest.mark.parametrize("name", ["text_config", "decoder", "generator", "text_encoder"])
def test_a_part_that_the_model_type_does_not_have_is_not_taken_for_its_sizes(
    make_model_folder: MakeFolder, name: str
) -> None:
    folder = make_model_folder()
    edit_json(folder / "config.json", **{name: {"num_hidden_layers": 1, "vocab_size": 3}})
    config = load_checkpoint(folder).network.config
    assert config.get_text_config() is config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 2**31), ("hidden_size", 2**40), ("vocab_size", 2**33), ("intermediate_size", 1e30),
        ("num_attention_heads", 2**20), ("head_dim", 2**40), ("num_key_value_heads", -1),
    ],
)  # fmt: skip
def test_sizes_that_no_memory_holds_are_refused_before_anything_is_made_of_them(
    make_model_folder: MakeFolder, name: str, value: float
) -> None:
    folder = make_model_folder()
    edit_json(folder / "config.json", **{name: value})
    with pytest.raises(ModelError, match=rf"config\.json: {name} is .*; it must be 0 to \d+"):
        load_checkpoint(folder)


def test_a_network_far_larger_than_its_files_is_refused_before_it_is_made(make_model_folder: MakeFolder) -> None:
    folder = make_model_folder()
    edit_json(folder / "config.json", intermediate_size=1 << 20)
    with pytest.raises(ModelError, match=r"config\.json requires [\d,]+ weights, but the files hold [\d,]+\."):
        load_checkpoint(folder)


def test_a_size_under_the_name_that_its_class_has_for_it_is_bounded_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2**31}))
    with pytest.raises(ModelError, match="n_layer is 2147483648"):
        check_folder(tmp_path)
