"""The adapter that is trained on a GPU: its data, its size, and a run on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import packed_file
from benchmarks.gpu.lines import read_lines
from benchmarks.gpu.packed_file import pack_file, read_packed_file, vocabulary_digest
from benchmarks.gpu.train_part import MAX_BYTES, flops, rank_for
from benchmarks.training import rows
from mars_ray.adapter.card import read_adapter_card
from mars_ray.adapter.folder import load_adapter
from mars_ray.adapter.gated_lora import GatedLoRA, LoraShape, linears_of, new_adapter
from mars_ray.adapter.mask_streams import mask_streams
from mars_ray.adapter.stored_tensors import stored_tensors
from mars_ray.errors import DataError
from mars_ray.model.resolve import resolve_model
from tests.factories.engine import bundled_checkpoint
from tests.factories.networks import network_of_rows
from tests.factories.token_rows import packed

CHECKPOINT = bundled_checkpoint()
DATA = rows(0, 8, 64, CHECKPOINT.mask_id)


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    file = tmp_path / "train.npz"
    file.write_bytes(pack_file(DATA, vocabulary_digest(CHECKPOINT.tokenizer)))
    return file


def test_a_file_gives_back_the_packed_sequences(data_file: Path) -> None:
    carried = read_packed_file(data_file, CHECKPOINT.tokenizer).rows([2, 0])
    expected = DATA.select([2, 0])
    assert all(torch.equal(getattr(carried, name), getattr(expected, name)) for name in expected.__slots__)


def test_a_file_holds_the_first_sequences_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "MAX_BYTES", 1500)
    content = pack_file(DATA, vocabulary_digest(CHECKPOINT.tokenizer))
    (tmp_path / "train.npz").write_bytes(content)
    carried = read_packed_file(tmp_path / "train.npz", CHECKPOINT.tokenizer)
    assert len(content) <= 1500
    assert 0 < len(carried) < len(DATA.tokens_RT)
    assert torch.equal(carried.rows([0]).tokens_RT, DATA.tokens_RT[:1])


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot be read"), (b"PK", "cannot be read"), (pack_file(DATA, "00" * 32), "tokens of another model")],
)
def test_a_file_that_does_not_fit_is_refused_by_name(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "train.npz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=f"train.npz .*{reason}"):
        read_packed_file(file, CHECKPOINT.tokenizer)


def test_operations_are_those_of_each_mask_and_clean_token() -> None:
    network = network_of_rows()
    adapter = new_adapter(network, rank=2, alpha=4.0, masks=4, names=None)
    streams = mask_streams(packed([[[False, True, True], [False, True, True, True]]]), masks=4)
    config = network.config
    inner = sum(
        module.weight.numel()
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    )
    own = sum(parameter.numel() for parameter in adapter.parameters())
    seen = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    clean = 7 * 2 * inner + (6 + 10) * seen
    # Three tokens of responses have a next one; their masks see 2, 2 and 3 tokens or masks.
    masks = 3 * (4 * inner + 6 * own + 6 * 64 * config.hidden_size) + 3 * (2 + 2 + 3) * seen
    assert flops(network, adapter, streams) == clean + masks


@pytest.mark.slow
def test_a_run_without_data_is_reported_by_what_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--device", "cpu", "--small", "--part", "train"]
    subprocess.run([*command, "--json", str(file)], check=True)
    assert ["training needs --data" in line["unavailable"] for line in read_lines(file) if "unavailable" in line] == [
        True
    ]


@pytest.mark.slow
def test_a_run_on_the_cpu_keeps_its_best_adapter(tmp_path: Path, data_file: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    words = ["--small", "--part", "train", "--data", str(data_file), "--seconds", "2", "--json", str(file)]
    subprocess.run([sys.executable, "-m", "benchmarks.gpu.run", "--device", "cpu", *words], check=True)
    lines = [line["train"] for line in read_lines(file) if "train" in line]
    assert len(lines) == 2
    assert lines[0]["best"]
    assert all(line["tokens_per_s"] > 0 and line["mfu"] >= 0 for line in lines)
    kept = tmp_path / "adapter"
    best = [line["steps"] for line in lines if line["best"]][-1]
    assert read_adapter_card(kept).steps == best
    load_adapter(kept, resolve_model("bundled"))
    assert sum(path.stat().st_size for path in kept.iterdir()) <= MAX_BYTES


def test_the_largest_rank_of_a_network_of_half_a_billion_fits_in_its_limit() -> None:
    shape = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    with torch.device("meta"):
        network = network_of_rows(**shape, num_key_value_heads=2, head_dim=64)
    rank = rank_for(network)
    lora = LoraShape(rank=rank, alpha=2.0 * rank, masks=8, linears=linears_of(network, None))
    stored = sum(tensor.nbytes for tensor in stored_tensors(GatedLoRA(lora, 896), torch.int8).values())
    assert 0.75 * MAX_BYTES < stored < MAX_BYTES
