"""The table of docs/train.md shows the arithmetic of `memory_samples`, and workers on CPUs keep to it."""

import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.training import allocated_peak
from mars_ray.method.loss import StreamLoss
from mars_ray.method.streams import clean_stream
from mars_ray.training.checkpoint import shard
from mars_ray.training.config import ComputeSection
from mars_ray.training.loop import new_accelerator
from mars_ray.training.step import train_step
from tests.factories.token_rows import packed
from tests.training.memory_samples import QWEN, Shape, sharded, whole
from tests.training.worker_samples import on_workers

GUIDE = Path(__file__).parents[2] / "docs" / "train.md"
POSITIONS = 4096
SMALL = Shape(hidden=256, layers=8, inner=1024, heads=4, key_heads=2, head_size=64, vocabulary=4096, tied=True)
SMALL_POSITIONS = 1024


@pytest.mark.parametrize("name", QWEN)
def test_the_guide_shows_the_memory_of_the_arithmetic(name: str) -> None:
    (cells,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", GUIDE.read_text(), re.MULTILINE)
    shape = QWEN[name]
    expected = [whole(shape, POSITIONS), *(sharded(shape, workers, POSITIONS) for workers in (2, 4, 8, 16))]
    assert [int(cell) for cell in cells.split(" | ")[:5]] == [round(size / 1e9) for size in expected]


def train_small(compute: ComputeSection) -> None:
    """Run two steps of a small network with activation checkpointing on this worker. 99 % of the tokens have labels."""
    accelerator = new_accelerator(compute)
    network = Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=SMALL.hidden,
            num_hidden_layers=SMALL.layers,
            intermediate_size=SMALL.inner,
            num_attention_heads=SMALL.heads,
            num_key_value_heads=SMALL.key_heads,
            vocab_size=SMALL.vocabulary,
            tie_word_embeddings=SMALL.tied,
        )
    )
    network.activation_checkpointing_enable({"use_reentrant": False})
    loss = StreamLoss(network.train())
    if compute.sharding == "fsdp":
        shard(network, accelerator)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    if compute.sharding == "ddp":
        loss, optimizer = accelerator.prepare(loss, optimizer)
    for seed in range(2):
        streams = clean_stream(packed([[[True] * 128] * (SMALL_POSITIONS // 128)], seed=seed))
        train_step(loss, optimizer, [streams], accelerator, ar_weight=1.0, clip_norm=1.0)


def peak_of_worker(compute: ComputeSection) -> int:
    """Return the most bytes that torch held on this worker, weights and optimizer included."""
    return allocated_peak(lambda: train_small(compute))


@pytest.mark.slow  # a minute: worker processes under a profiler
@pytest.mark.parametrize(("precision", "number"), [("float32", 4), ("bfloat16", 2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_worker_needs_at_most_the_memory_of_the_arithmetic_and_at_least_three_quarters(
    tmp_path: Path, sharding: str, workers: int, precision: str, number: int
) -> None:
    compute = ComputeSection.model_validate({"sharding": sharding, "precision": precision, "workers": workers})
    expected = (
        whole(SMALL, SMALL_POSITIONS, number) if sharding == "ddp" else sharded(SMALL, workers, SMALL_POSITIONS, number)
    )
    peaks = on_workers(workers, peak_of_worker, tmp_path, compute)
    assert all(0.75 * expected <= peak <= expected for peak in peaks), (peaks, expected)
