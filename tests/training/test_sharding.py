"""Runs whose weights are sharded over workers: they equal runs of DDP, in a part of the memory."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from mars_ray.adapter.folder import WEIGHTS_FILE
from mars_ray.adapter.gated_lora import new_adapter
from mars_ray.adapter.loss import AdapterLoss
from mars_ray.adapter.mask_streams import mask_streams
from mars_ray.errors import ConfigError
from mars_ray.method.loss import StreamLoss
from mars_ray.method.streams import clean_stream
from mars_ray.training.checkpoint import shard
from mars_ray.training.config import ComputeSection, TrainConfig
from mars_ray.training.loop import TrainingRun, new_accelerator
from mars_ray.training.metrics import read_metrics
from mars_ray.training.run_folder import RunFolder
from mars_ray.training.step import train_step
from tests.factories.token_rows import packed
from tests.training.test_loop import FolderStore
from tests.training.train_samples import MakeConfig, pack
from tests.training.worker_samples import on_workers, train

pytestmark = pytest.mark.slow  # one to two minutes: many worker processes
ADAPTER = {"kind": "mars", "block": 4, "adapter": {"rank": 4}}
MARS = {"kind": "mars", "block": 4}


@pytest.fixture
def run(make_config: MakeConfig, start_model: Path, tmp_path: Path) -> Any:
    """Train on workers and return the config; a second call with the same name resumes."""

    def run(name: str, workers: int, sharding: str = "fsdp", lives: int = 1000, **changes: Any) -> TrainConfig:
        compute = {"workers": workers, "sharding": sharding, "precision": "float32"} | changes.pop("compute", {})
        optimizer = {"learning_rate": 1e-3, "epochs": 1, "batch_rows": 4, "micro_rows": 1}
        config = make_config(
            name, **{"objective": MARS, "optimizer": optimizer, "compute": compute, "measure_rows": 4} | changes
        )
        if not config.output.exists():
            pack(config, start_model, 48)
        states = tmp_path / f"{name}-states"
        if workers == 1:
            TrainingRun(config, start_model, Accelerator(cpu=True), FolderStore(states)).run()
        else:
            on_workers(workers, train, tmp_path, config, states, lives)
        return config

    return run


def figures(config: TrainConfig) -> list[list[float]]:
    """Return the losses, gradient norm and lookahead of each step, as far as it measured them."""
    lines = read_metrics(config.output)
    values = [(line.ar_loss, line.mask_loss, line.grad_norm, line.heldout_tokens_per_forward) for line in lines]
    return [[value for value in line if value is not None] for line in values]


def weights(config: TrainConfig) -> dict[str, Tensor]:
    name = WEIGHTS_FILE if config.objective.adapter else "model.safetensors"
    return load_file(RunFolder(config.output).model_here() / name)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("objective", [MARS, ADAPTER], ids=["mars", "adapter"])
def test_sharded_workers_have_the_losses_and_end_with_the_weights_of_ddp(
    run: Any, workers: int, objective: dict[str, Any]
) -> None:
    whole = run("whole", workers, "ddp", objective=objective)
    sharded = run("sharded", workers, objective=objective)
    assert len(figures(sharded)) == 5
    for line, expected in zip(figures(sharded), figures(whole), strict=True):
        assert line == pytest.approx(expected, rel=1e-5)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(sharded)[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("workers", "objective"), [(1, MARS), (2, MARS), (1, ADAPTER)], ids=["mars-1", "mars-2", "adapter-1"]
)
def test_layers_computed_again_in_the_backward_pass_change_no_figure(
    run: Any, workers: int, objective: dict[str, Any]
) -> None:
    sharding = "ddp" if workers == 1 else "fsdp"
    kept = run("kept", workers, sharding, objective=objective)
    again = run("again", workers, sharding, objective=objective, compute={"activation_checkpointing": True})
    for line, expected in zip(figures(again), figures(kept), strict=True):
        assert line == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("objective", [MARS, ADAPTER], ids=["mars", "adapter"])
def test_a_sharded_run_whose_worker_is_killed_ends_with_the_same_weights_bit_for_bit(
    run: Any, objective: dict[str, Any]
) -> None:
    whole = run("whole", 2, objective=objective, checkpoint_every=2)
    with pytest.raises(RuntimeError, match="died"):
        run("cut", 2, objective=objective, checkpoint_every=2, lives=1)
    cut = run("cut", 2, objective=objective, checkpoint_every=2)
    assert figures(cut) == figures(whole)
    assert all(torch.equal(weights(whole)[name], tensor) for name, tensor in weights(cut).items())


@pytest.mark.parametrize("workers", [1, 4])
def test_a_sharded_run_can_go_on_with_another_number_of_workers_and_unsharded(run: Any, workers: int) -> None:
    whole = run("whole", 2, checkpoint_every=2)
    with pytest.raises(RuntimeError, match="died"):
        run("cut", 2, checkpoint_every=2, lives=1)
    cut = run("cut", workers, "ddp" if workers == 1 else "fsdp", checkpoint_every=2)
    for line, expected in zip(figures(cut), figures(whole), strict=True):
        assert line == pytest.approx(expected, rel=1e-5)


def test_a_run_of_ddp_cannot_go_on_sharded(run: Any) -> None:
    with pytest.raises(RuntimeError, match="died"):
        run("cut", 2, "ddp", checkpoint_every=2, lives=1)
    with pytest.raises(ConfigError, match="sharding is fsdp, but the run was saved with ddp"):
        run("cut", 2, checkpoint_every=2)


def test_in_bfloat16_sharded_workers_compute_in_it_and_train_float32_weights(run: Any) -> None:
    mixed = run("mixed", 2, compute={"precision": "bfloat16"})
    exact = run("exact", 2)
    assert {tensor.dtype for tensor in weights(mixed).values()} == {torch.float32}
    for line, expected in zip(figures(mixed), figures(exact), strict=True):
        assert line[:2] == pytest.approx(expected[:2], rel=0.02)
    assert figures(mixed)[0] != figures(exact)[0]
    changed = [torch.equal(tensor.bfloat16().float(), tensor) for tensor in weights(mixed).values()]
    assert not any(changed)  # small updates are kept


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the memory that tensors hold on this worker; shared memory counts once."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())


def memory_after_a_step(start_model: Path, sharded: bool) -> tuple[int, int]:
    """Return the bytes of weights and of optimizer state that a worker holds after a step."""
    accelerator = new_accelerator(ComputeSection(precision="float32"))
    network = AutoModelForCausalLM.from_pretrained(start_model)
    loss = StreamLoss(network)
    if sharded:
        shard(network, accelerator)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    train_step(
        loss, optimizer, [clean_stream(packed([[[True] * 8]], seed=5))], accelerator, ar_weight=1.0, clip_norm=1.0
    )
    moments = (moment for state in optimizer.state.values() for moment in state.values() if moment.ndim)
    return held_bytes(network.parameters()), held_bytes(moments)


@pytest.mark.parametrize("workers", [2, 4])
def test_each_worker_holds_its_share_of_weights_and_optimizer(start_model: Path, tmp_path: Path, workers: int) -> None:
    whole = on_workers(1, memory_after_a_step, tmp_path, start_model, False)[0]
    for held in on_workers(workers, memory_after_a_step, tmp_path, start_model, True):
        assert held == pytest.approx([size / workers for size in whole], rel=0.02)


def adapter_loss_of_rank(start_model: Path) -> tuple[float, float]:
    """Run an adapter's loss over a sharded base; only the first worker has labels."""
    accelerator = new_accelerator(ComputeSection(precision="float32"))
    network = AutoModelForCausalLM.from_pretrained(start_model)
    adapter = new_adapter(network, rank=2, alpha=4.0, masks=2, names=None)
    loss = AdapterLoss(network, adapter, 1.0)
    shard(network, accelerator)
    rows = packed([[[False] + [accelerator.is_main_process] * 7]], seed=5)
    mask_sum, base_sum = loss(mask_streams(rows, masks=2))
    mask_sum.backward()
    return float(mask_sum), float(base_sum)


def test_a_worker_without_labels_helps_the_others_to_gather_the_base(start_model: Path, tmp_path: Path) -> None:
    first, second = on_workers(2, adapter_loss_of_rank, tmp_path, start_model)
    assert min(first) > 0
    assert second == (0, 0)
