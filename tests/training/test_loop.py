"""A run in one plain process: it learns, and however it is cut, it ends with the same weights."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mars_ray.errors import DivergedError
from mars_ray.model.card import read_card
from mars_ray.training.checkpoint import RunState
from mars_ray.training.config import TrainConfig
from mars_ray.training.loop import TrainingRun
from mars_ray.training.metrics import StepMetrics, follow_metrics, plot_metrics, read_metrics
from mars_ray.training.run_folder import RunFolder
from tests.training.train_samples import MakeConfig, pack


class FolderStore:
    """Keeps every state in a numbered folder; `dies_after` states it takes the process with it."""

    def __init__(self, folder: Path, dies_after: int = 1000, stops: RunFolder | None = None) -> None:
        self._folder, self._dies_after, self._stops = folder, dies_after, stops
        folder.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def latest(self) -> Iterator[Path | None]:
        yield max(self._folder.iterdir(), key=lambda path: int(path.name), default=None)

    def save(self, write: Callable[[Path], None]) -> None:
        number = len(list(self._folder.iterdir())) + 1
        folder = self._folder / str(number)
        folder.mkdir()
        write(folder)
        if self._stops:
            self._stops.ask_to_stop()
        if number == self._dies_after:
            raise KilledError


class KilledError(Exception):
    """Stands for the death of the process between two steps."""


def run(config: TrainConfig, store: FolderStore) -> RunState:
    torch.manual_seed(0)
    return TrainingRun(config, Path(config.model), Accelerator(cpu=True), store).run()


def weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    return load_file(RunFolder(config.output).model_here() / "model.safetensors")


@pytest.fixture(params=["ar", "mars"])
def config(request: pytest.FixtureRequest, make_config: MakeConfig, start_model: Path) -> TrainConfig:
    made = make_config("whole", objective={"kind": "ar"} if request.param == "ar" else {"kind": "mars", "block": 4})
    pack(made, start_model)
    return made


def again(config: TrainConfig, name: str, start_model: Path) -> TrainConfig:
    """The same run in another folder."""
    other = config.model_copy(update={"output": config.output.with_name(name)})
    pack(other, start_model)
    return other


def test_a_run_learns_and_leaves_a_plain_model_folder(config: TrainConfig, start_model: Path, tmp_path: Path) -> None:
    state = run(config, FolderStore(tmp_path / "states"))
    metrics = read_metrics(config.output)
    assert [each.step for each in metrics] == list(range(1, state.steps + 1))
    assert metrics[-1].ar_loss < 0.8 * metrics[0].ar_loss
    network = AutoModelForCausalLM.from_pretrained(RunFolder(config.output).model_here())
    assert torch.isfinite(network(input_ids=torch.tensor([[1, 2, 3]])).logits).all()
    card = read_card(RunFolder(config.output).model_here())
    assert card is not None
    assert (card.method, card.steps, card.tokens) == (config.objective.kind, state.steps, state.tokens)
    assert card.base_model == start_model.name


@pytest.mark.parametrize("dies_after", [1, 2])
def test_a_killed_run_ends_with_the_weights_of_a_whole_one_bit_for_bit(
    config: TrainConfig, start_model: Path, tmp_path: Path, dies_after: int
) -> None:
    run(config, FolderStore(tmp_path / "states"))
    cut = again(config, "cut", start_model)
    with pytest.raises(KilledError):
        run(cut, FolderStore(tmp_path / "cut-states", dies_after=dies_after))
    run(cut, FolderStore(tmp_path / "cut-states"))
    whole, resumed = weights(config), weights(cut)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert [each.ar_loss for each in read_metrics(cut.output)] == [each.ar_loss for each in read_metrics(config.output)]


def test_a_run_asked_to_stop_saves_and_goes_on_later(config: TrainConfig, start_model: Path, tmp_path: Path) -> None:
    run(config, FolderStore(tmp_path / "states"))
    cut = again(config, "cut", start_model)
    stopped = run(cut, FolderStore(tmp_path / "cut-states", stops=RunFolder(cut.output)))
    assert stopped.steps == 5
    assert not RunFolder(cut.output).model.exists()
    RunFolder(cut.output).begin_attempt()
    run(cut, FolderStore(tmp_path / "cut-states"))
    assert all(torch.equal(weights(config)[name], tensor) for name, tensor in weights(cut).items())


def test_a_diverged_run_names_step_and_learning_rate(
    make_config: MakeConfig, start_model: Path, tmp_path: Path
) -> None:
    config = make_config(optimizer={"learning_rate": 1e30, "epochs": 2, "batch_rows": 4, "warmup": 0})
    pack(config, start_model)
    with pytest.raises(DivergedError, match=r"Step 2 of \d+: .*nan.*learning rate \S+e\+29"):
        run(config, FolderStore(tmp_path / "states"))


def test_only_the_mars_objective_reports_how_far_it_looks_ahead(config: TrainConfig, tmp_path: Path) -> None:
    run(config, FolderStore(tmp_path / "states"))
    measured = [each.step for each in read_metrics(config.output) if each.heldout_tokens_per_forward is not None]
    last = read_metrics(config.output)[-1].step
    assert measured == (sorted({*range(4, last + 1, 4), last}) if config.objective.kind == "mars" else [])


def test_a_follower_sees_each_step_once_and_a_resumed_run_from_its_beginning(tmp_path: Path) -> None:
    path, follower = tmp_path / "metrics.jsonl", follow_metrics(tmp_path)
    line = dict.fromkeys(StepMetrics.__slots__, 0.0)
    assert next(follower) is None
    with path.open("w") as file:
        file.write(json.dumps(line | {"step": 1}) + "\n" + json.dumps(line | {"step": 2})[:9])
    first = next(follower)
    assert first is not None
    assert (first.step, next(follower)) == (1, None)
    path.write_text("")
    assert next(follower) is None
    path.write_text(json.dumps(line | {"step": 7}) + "\n")
    resumed = next(follower)
    assert resumed is not None
    assert resumed.step == 7


def test_a_follower_starts_over_where_dropped_lines_have_grown_again_past_its_place(tmp_path: Path) -> None:
    path, follower = tmp_path / "metrics.jsonl", follow_metrics(tmp_path)
    line = dict.fromkeys(StepMetrics.__slots__, 0.0)
    path.write_text(json.dumps(line | {"step": 1}) + "\n")
    assert next(follower) is not None
    assert next(follower) is None
    path.write_text("".join(json.dumps(line | {"step": step, "ar_loss": 0.123}) + "\n" for step in (1, 2)))
    assert [each.step for each in (next(follower), next(follower)) if each] == [1, 2]


def test_the_figures_become_a_picture(config: TrainConfig, tmp_path: Path) -> None:
    run(config, FolderStore(tmp_path / "states"))
    plot_metrics(read_metrics(config.output), tmp_path / "metrics.png")
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
