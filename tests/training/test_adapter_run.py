"""A run that trains an adapter: it learns, resumes bit for bit, and leaves its base alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import OPTConfig, OPTForCausalLM

from mars_ray.adapter.card import read_adapter_card
from mars_ray.adapter.folder import WEIGHTS_FILE, load_adapter
from mars_ray.errors import AdapterError
from mars_ray.model.card import write_card
from mars_ray.model.digest import folder_digest, weights_digest
from mars_ray.training.checkpoint import RunState
from mars_ray.training.config import TrainConfig
from mars_ray.training.loop import TrainingRun, _stop_dropout
from mars_ray.training.metrics import plot_metrics, read_metrics
from mars_ray.training.run_folder import RunFolder
from pipelines.reproduction.training import LocalStore
from tests.training.test_loop import FolderStore
from tests.training.train_samples import MakeConfig, pack


def run(config: TrainConfig, folder: Path) -> RunState:
    return TrainingRun(config, Path(config.model), Accelerator(cpu=True), LocalStore(folder)).run()


@pytest.fixture
def config(make_config: MakeConfig, start_model: Path) -> TrainConfig:
    made = make_config("whole", objective={"kind": "mars", "block": 4, "adapter": {"rank": 4}})
    pack(made, start_model)
    return made


def test_an_adapter_learns_what_its_base_says_and_the_base_stays(
    config: TrainConfig, start_model: Path, tmp_path: Path
) -> None:
    before = folder_digest(start_model)
    state = run(config, tmp_path / "states")
    metrics = read_metrics(config.output)
    assert metrics[-1].mask_loss is not None
    assert metrics[0].mask_loss is not None
    assert metrics[-1].mask_loss < metrics[0].mask_loss
    measured = [each for each in metrics if each.heldout_agreement]
    assert [each.step for each in measured] == sorted({*range(4, state.steps + 1, 4), state.steps})
    # A forward gives the base's own token and those of the masks: four with three masks.
    assert all(len(each.heldout_agreement or []) == 3 for each in measured)
    plot_metrics(metrics, tmp_path / "metrics.png")
    card = read_adapter_card(RunFolder(config.output).model_here())
    best = max(measured, key=lambda each: (each.heldout_tokens_per_forward, -each.step))
    assert (card.steps, card.block) == (best.step, 4) == (state.best_steps, 4)
    assert card.base_digest == weights_digest(start_model)
    assert load_adapter(RunFolder(config.output).model_here(), start_model).lora.shape.masks == 3
    assert folder_digest(start_model) == before


def test_the_base_of_an_adapter_has_no_dropout(make_config: MakeConfig, start_model: Path, tmp_path: Path) -> None:
    forgetful = shutil.copytree(start_model, tmp_path / "forgetful")
    settings = json.loads((forgetful / "config.json").read_text())
    (forgetful / "config.json").write_text(json.dumps(settings | {"attention_dropout": 0.9}))
    lines: list[list[tuple[float, float | None]]] = []
    for model in (start_model, forgetful):
        for compute in ({}, {"activation_checkpointing": True}):
            config = make_config(
                f"{model.name}-{len(lines)}",
                model=str(model),
                objective={"kind": "mars", "block": 4, "adapter": {"rank": 4}},
                optimizer={"learning_rate": 1e-3, "epochs": 1},
                compute=compute,
            )
            pack(config, start_model)
            run(config, tmp_path / f"{config.output.name}-states")
            lines.append([(line.ar_loss, line.mask_loss) for line in read_metrics(config.output)])
    assert lines[1:] == lines[:1] * 3


def test_layers_that_drop_by_themselves_drop_nothing_either() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    network = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=32, dropout=0.9, attention_dropout=0.9)).train()
    tokens = torch.arange(3, 20)[None]
    assert not torch.equal(network(tokens).logits, network(tokens).logits)
    _stop_dropout(network)
    assert torch.equal(network(tokens).logits, network(tokens).logits)


def test_held_out_rows_are_measured_in_parts_of_the_size_of_micro_batches(
    config: TrainConfig, start_model: Path, tmp_path: Path
) -> None:
    sizes = [1, 16]
    figures = []
    for size in sizes:
        optimizer = config.optimizer.model_copy(update={"micro_rows": size})
        part = config.model_copy(update={"optimizer": optimizer, "output": config.output.with_name(f"by-{size}")})
        pack(part, start_model)
        training = TrainingRun(part, Path(part.model), Accelerator(cpu=True), LocalStore(tmp_path / "states"))
        figures.append(training._look_ahead())
    assert figures[0] == figures[1] is not None


def test_a_stopped_run_ends_with_the_adapter_of_a_whole_one_bit_for_bit(
    config: TrainConfig, start_model: Path, tmp_path: Path
) -> None:
    run(config, tmp_path / "states")
    cut = config.model_copy(update={"output": config.output.with_name("cut")})
    pack(cut, start_model)
    folder = RunFolder(cut.output)
    stopped = TrainingRun(
        cut, Path(cut.model), Accelerator(cpu=True), FolderStore(tmp_path / "cut-states", stops=folder)
    ).run()
    assert not folder.model.exists()
    folder.begin_attempt()
    assert run(cut, tmp_path / "cut-states").steps > stopped.steps > 0
    whole, resumed = (load_file(RunFolder(each.output).model_here() / WEIGHTS_FILE) for each in (config, cut))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_run_that_finds_nothing_better_ends_early_with_the_best(
    make_config: MakeConfig, start_model: Path, tmp_path: Path
) -> None:
    config = make_config(
        "still",
        objective={"kind": "mars", "block": 4, "adapter": {"rank": 4}},
        optimizer={"learning_rate": 1e-9, "epochs": 9, "batch_rows": 4},
        patience=2,
    )
    pack(config, start_model)
    state = run(config, tmp_path / "states")
    metrics = read_metrics(config.output)
    assert (state.best_steps, state.steps, metrics[-1].steps > 12) == (4, 12, True)
    assert [each.step for each in metrics if each.is_best] == [4]
    assert read_adapter_card(RunFolder(config.output).model_here()).steps == 4
    assert [each.name for each in (config.output / "best").iterdir()] == ["4"]


def test_in_bfloat16_the_base_is_loaded_as_such_and_the_adapter_learns_in_float32(
    make_config: MakeConfig, start_model: Path, tmp_path: Path
) -> None:
    made = make_config(
        objective={"kind": "mars", "block": 4, "adapter": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}},
        compute={"precision": "bfloat16"},
    )
    pack(made, start_model)
    run(made, tmp_path / "states")
    first, last = (read_metrics(made.output)[place].mask_loss for place in (0, -1))
    assert first is not None
    assert last is not None
    assert last < first
    loaded = load_adapter(RunFolder(made.output).model_here(), start_model).lora
    assert {name.rpartition(".")[2] for name in loaded.factors} == {"q_proj", "v_proj"}


def test_an_adapter_of_the_same_sizes_may_be_begun_with_whatever_its_base(
    config: TrainConfig, make_config: MakeConfig, start_model: Path, tmp_path: Path
) -> None:
    run(config, tmp_path / "states")
    first = RunFolder(config.output).model_here()
    card = read_adapter_card(first)
    write_card(card.model_copy(update={"base_digest": "of another model"}), first)
    adapter = {"rank": 4, "init": str(first)}
    going_on = make_config("on", objective={"kind": "mars", "block": 4, "adapter": adapter})
    pack(going_on, start_model)
    run(going_on, tmp_path / "on-states")
    began, ended = (read_metrics(each.output) for each in (going_on, config))
    assert began[0].mask_loss is not None
    assert ended[0].mask_loss is not None
    assert began[0].mask_loss < ended[0].mask_loss
    assert read_adapter_card(RunFolder(going_on.output).model_here()).init_digest == folder_digest(first)
    smaller = make_config(objective={"kind": "mars", "block": 4, "adapter": {"rank": 2, "init": str(first)}})
    pack(smaller, start_model)
    with pytest.raises(AdapterError, match="it has rank 4, here it is 2"):
        run(smaller, tmp_path / "smaller-states")
