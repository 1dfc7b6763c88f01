"""Other engines beside ours: the same model in their files, one table, and a word where one is absent."""

import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers import comparison, llama_cpp
from benchmarks.peers.comparison import compare_peers, shared
from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.llama_cpp import LlamaCpp, bits_of, llama_cpp_peers
from benchmarks.peers.openvino import openvino_peers
from benchmarks.peers.own_engine import BITS, OwnEngine
from benchmarks.peers.peer import PeerUnavailableError, TimedAnswers
from benchmarks.peers.prompts import prompts_of_one_length
from benchmarks.peers.report import ours_like, report, show
from mars_ray.errors import ConfigError
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.model.resolve import resolve_model
from tests.factories.networks import tiny_network
from tests.factories.tokenizers import tiny_tokenizer
from tests.model.model_samples import logits_of


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny_network(request.param, vocab_size=320, tie_word_embeddings=request.param == "qwen2").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(bundled: Checkpoint) -> list[list[int]]:
    return prompts_of_one_length(bundled, 3)


class Echo:
    """Says the last token of each prompt, again and again, in a second for reading and a second for the rest."""

    name, bits, load_seconds = "echo 4 bits", 4, 0.5

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> TimedAnswers:
        said = [[prompt[-1]] * tokens for prompt in prompts]
        return TimedAnswers(tokens=said, prompt_seconds=1.0, decode_seconds=1.0, forwards=tokens - 1)


def test_what_is_shared_ends_at_the_first_difference() -> None:
    assert shared([[1, 2, 3, 4], [1, 9, 3, 4]], [[1, 2, 3, 4], [1, 2, 3, 4]]) == 5 / 8


def test_an_engine_is_compared_with_ours_of_as_many_bits_where_there_is_one() -> None:
    bits = {"mars-ray bfloat16": 16, "mars-ray int8": 8, "other 8": 8, "other 4": 4}
    assert (ours_like("other 8", bits), ours_like("other 4", bits)) == ("mars-ray int8", "mars-ray bfloat16")


def test_prompts_have_one_length_and_differ(prompts: list[list[int]]) -> None:
    assert [len(prompt) for prompt in prompts] == [128] * 3
    assert len({tuple(prompt) for prompt in prompts}) == 3


def test_our_engine_reads_all_prompts_and_then_decodes_all(prompts: list[list[int]]) -> None:
    engine = OwnEngine(resolve_model("bundled"), 3, 128)
    timed = engine.answer(prompts, 5)
    assert [len(answer) for answer in timed.tokens] == [5] * 3
    assert timed.forwards == 4
    assert engine.answer(prompts, 5).tokens == timed.tokens


@pytest.mark.parametrize("folder", ["qwen2", "llama"], indirect=True)
def test_the_file_holds_the_model(folder: Path, tmp_path: Path) -> None:
    write_gguf(folder, tmp_path / "model.gguf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    asked = logits_of(AutoModelForCausalLM.from_pretrained(folder))
    assert (logits_of(read) - asked).norm() < 1e-3 * asked.norm()


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        (gguf.LlamaFileType.ALL_F32, 32),
        (gguf.LlamaFileType.MOSTLY_BF16, 16),
        (gguf.LlamaFileType.MOSTLY_Q8_0, 8),
        (gguf.LlamaFileType.MOSTLY_Q4_K_M, 4),
    ],
)
def test_the_bits_of_a_file_are_those_of_its_header(kind: gguf.LlamaFileType, bits: int, tmp_path: Path) -> None:
    assert bits_of(file_of(kind, tmp_path)) == bits


def test_a_file_of_unknown_bits_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailableError, match=r"model\.gguf has general\.file_type 1024"):
        bits_of(file_of(gguf.LlamaFileType.GUESSED, tmp_path))


def file_of(kind: gguf.LlamaFileType, folder: Path) -> Path:
    """Return a file without tensors whose header says that its weights are of one kind."""
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_file_type(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return folder / "model.gguf"


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
def test_an_architecture_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailableError, match=r"of qwen3 no \.gguf file can be made here, only of llama, qwen2"):
        write_gguf(folder, tmp_path / "model.gguf")


def test_everyone_is_in_the_table_and_who_is_absent_below_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(comparison.FACTORIES, "echo", lambda *_: [Echo()])
    monkeypatch.setattr(comparison, "ANSWER_TOKENS", 3)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    found = compare_peers("bundled", ["echo", "llama.cpp"], [1, 2], 2, 1, 1)
    assert found.absent["llama.cpp"] == f"not installed: {llama_cpp.INSTALL}"
    ours = [f"mars-ray {each or 'bfloat16'}" for each in BITS if f"mars-ray {each}" not in found.absent]
    assert [list(batch.samples) for batch in found.batches] == [[*ours, "echo 4 bits"]] * 2
    written = report("bundled", 1, found)["batches"][1]["engines"]["echo 4 bits"]
    assert written["tokens_per_s"]["median"] == 2 * 2 / 1.0  # two answers of three, the first token of each is read
    assert written["prompt_tokens_per_s"]["median"] == 2 * 128 / 1.0
    show("bundled", 1, found)
    shown = capsys.readouterr().out
    assert "echo 4 bits" in shown
    assert shown.splitlines()[-1] == f"llama.cpp: not installed: {llama_cpp.INSTALL}"


def test_an_unknown_engine_is_said_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="unknown peer 'triton'"):
        compare_peers("bundled", ["triton"], [1], 1, 1, 1)


def test_more_requests_than_there_are_prompts_are_refused(bundled: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"100000 requests are asked for; there are 1\.\."):
        prompts_of_one_length(bundled, 100_000)


@pytest.fixture
def llama_cpp_bundled(bundled: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[LlamaCpp]:
    pytest.importorskip("llama_cpp", reason="llama.cpp is an extra")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return llama_cpp_peers(resolve_model("bundled"), 1, bundled.mask_id)


def test_llama_cpp_says_what_we_say(llama_cpp_bundled: list[LlamaCpp], prompts: list[list[int]]) -> None:
    ours = OwnEngine(resolve_model("bundled"), 3, 128).answer(prompts, 16).tokens
    said = {peer.name: peer.answer(prompts, 16).tokens for peer in llama_cpp_bundled}
    assert list(said) == ["llama.cpp F16", "llama.cpp Q8_0", "llama.cpp Q4_0"]
    assert shared(said["llama.cpp F16"], ours) > 0.6
    whole = llama_cpp_bundled[0]
    assert [whole.answer([prompt], 16).tokens[0] for prompt in prompts] == said["llama.cpp F16"]
    for peer in llama_cpp_bundled:
        peer.close()


@pytest.mark.slow  # it loads and compiles three models
def test_openvino_says_what_we_say(llama_cpp_bundled: list[LlamaCpp], prompts: list[list[int]]) -> None:
    pytest.importorskip("openvino_genai", reason="OpenVINO is an extra")
    ours = OwnEngine(resolve_model("bundled"), 3, 128).answer(prompts, 16).tokens
    said = {peer.name: peer.answer(prompts, 16).tokens for peer in openvino_peers(resolve_model("bundled"), 1, 0)}
    assert list(said) == ["openvino F16", "openvino Q8_0", "openvino Q4_0"]
    assert shared(said["openvino F16"], ours) > 0.6
