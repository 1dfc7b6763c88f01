"""Place the workers of a run with Ray Train and follow it from the command line (shell).

Ray Train restarts dead workers and decides which checkpoint counts; running the same config again goes on from
there. `fit` runs in a thread: the main thread shows progress and turns Ctrl-C into a request to save and stop.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray.train
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.exceptions import OutOfMemoryError, RayError
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from upath import UPath

from mars_ray.adapter.card import resolve_adapter
from mars_ray.data.packed import REPORT_FILE, read_report
from mars_ray.data.ray_prepare import PrepareOptions, prepare
from mars_ray.errors import ClusterError, InterruptedRunError, MarsRayError, RunError
from mars_ray.model.digest import folder_digest
from mars_ray.model.dtype import resolve_dtype
from mars_ray.model.resolve import model_label, pin, resolve_model
from mars_ray.model.sources.ray_folder import SharedFolder, share_folder
from mars_ray.progress import ProgressLine
from mars_ray.ray_cluster import connect
from mars_ray.storage.whole_file import write_folder
from mars_ray.training.config import TrainConfig, parse_config
from mars_ray.training.loop import TrainingRun
from mars_ray.training.metrics import StepMetrics, follow_metrics, plot_metrics, read_metrics
from mars_ray.training.run_folder import RunFolder

POLL_S, STORE_POLL_S = 0.5, 2.0


def train(config: TrainConfig) -> StepMetrics:
    """Run `config` to its end, from where an earlier run of it stopped; return the figures of the last step.

    A finished run returns at once. Raises `ConfigError` when the output folder belongs to other settings,
    `OutputError` when another process works in it, `ClusterError` for too small a cluster, `DataError` for unusable
    data, `DivergedError` and `InterruptedRunError` as they say, and `RunError` when workers keep dying.
    """
    base = resolve_model(config.model).absolute()
    # Decided here, so that the settings of the run name it and workers on other machines do the same.
    dtype = resolve_dtype(config.compute.precision, base, "cuda" if config.compute.gpu else "cpu")
    compute = config.compute.model_copy(update={"precision": dtype.name})
    # A branch of a hub may move; workers have another working folder.
    fixed = {"model": pin(config.model, base), "output": config.output.absolute(), "compute": compute}
    config = config.model_copy(update=fixed)
    folder = RunFolder(config.output)
    with folder.only_driver():
        folder.check_settings(_settings(config, base))
        if not folder.finished:
            print(f"train: {dtype.name}: {dtype.reason}", file=sys.stderr)
            connect()
            _check_cluster(config)
            _prepare_data(config, base, folder)
            _fit(config, base, folder)
        metrics = read_metrics(folder.path)
        plot_metrics(metrics, folder.picture)
        return metrics[-1]


def _settings(config: TrainConfig, base: Path) -> dict[str, Any]:
    """Return what a run keeps to, whatever machine goes on with it: folders of this one by what is in them."""
    settings: dict[str, Any] = config.model_dump(mode="json", exclude={"output"})
    settings |= {"model": model_label(config.model, base), "model_digest": folder_digest(base)}
    if init := _init(config):
        settings["objective"]["adapter"]["init"] = folder_digest(init)
    return settings


def _init(config: TrainConfig) -> Path | None:
    """Return the folder of the adapter that training begins with, if it does."""
    return resolve_adapter(config.objective.adapter.init) if config.objective.adapter else None


def _prepare_data(config: TrainConfig, base: Path, folder: RunFolder) -> None:
    data = config.data
    options = PrepareOptions(length=data.length, overlong=data.overlong, bad_records=data.bad_records)
    for source, packed in ((data.heldout, folder.heldout_data), (data.train, folder.train_data)):
        if read_report(packed) is None:
            with ProgressLine(f"tokenise {source.name}", total=None) as progress:
                pack = partial(prepare, source, model=base, options=options, progress=progress)
                write_folder(packed, pack, last=REPORT_FILE)


def _fit(config: TrainConfig, base: Path, folder: RunFolder) -> None:
    outcome: list[ray.train.Result | BaseException] = []

    def fit() -> None:
        try:
            outcome.append(_trainer(config, base).fit())
        except BaseException as error:
            outcome.append(error)

    folder.begin_attempt()
    thread = threading.Thread(target=fit, daemon=True)
    asked = threading.Event()
    with _sigint(asked.set), ProgressLine("train", total=None) as progress:
        thread.start()
        _show_progress(folder, progress, thread, asked)
    result = outcome[0]
    if isinstance(result, (ray.train.TrainingFailedError, RayError)):
        lines = str(result).strip().splitlines()
        # Of all of Ray's errors this one alone says what was wrong before it says the rest.
        reason = lines[0 if isinstance(result, OutOfMemoryError) else -1].removesuffix(".")
        raise RunError(
            f"The run failed: {reason}. Its state is saved in {folder.path}; mend the "
            "cause and run the same command to go on."
        ) from result
    if isinstance(result, BaseException):
        raise result
    folder.raise_reason()
    if not folder.finished:
        steps = len(read_metrics(folder.path))
        raise InterruptedRunError(
            f"Stopped after {steps} steps, saved in {folder.path}. Run the same command to go on."
        )


def _trainer(config: TrainConfig, base: Path) -> TorchTrainer:
    compute, init, parent = config.compute, _init(config), config.output.parent
    shared = {"base": share_folder(base), "init": share_folder(init) if init else None}
    return TorchTrainer(
        _worker,
        train_loop_config={"config": config.model_dump(mode="json")} | shared,
        scaling_config=ScalingConfig(
            num_workers=compute.workers,
            use_gpu=compute.gpu,
            resources_per_worker={"CPU": compute.cpus_per_worker} | ({"GPU": 1} if compute.gpu else {}),
        ),
        run_config=RunConfig(
            name=config.output.name,
            storage_path=parent.path if isinstance(parent, UPath) else str(parent),
            storage_filesystem=PyFileSystem(FSSpecHandler(parent.fs)) if isinstance(parent, UPath) else None,
            failure_config=FailureConfig(max_failures=compute.worker_restarts),
            checkpoint_config=CheckpointConfig(num_to_keep=config.checkpoints_kept),
        ),
    )


def _worker(given: dict[str, Any]) -> None:
    config = parse_config(given["config"], "the driver")
    torch.set_num_threads(config.compute.cpus_per_worker)
    accelerator = Accelerator(
        cpu=not config.compute.gpu,
        mixed_precision={"float32": "no", "bfloat16": "bf16"}[config.compute.precision],
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if config.compute.sharding == "fsdp" else None,
        # Else DDP lays its gradients out anew behind the first step it makes, and three workers or more add them up in
        # another order: a run that goes on from a checkpoint would differ in the last bits from one that never stopped.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    try:
        init: SharedFolder | None = given["init"]
        if init:
            config = _starting_from(config, init.here())
        TrainingRun(config, given["base"].here(), accelerator, RayCheckpointStore()).run()
    except MarsRayError as error:
        # Trying again would end the same way, so it must not look like a worker's death to Ray.
        RunFolder(config.output).give_up(error)


def _starting_from(config: TrainConfig, init: Path) -> TrainConfig:
    adapter = config.objective.adapter
    assert adapter is not None
    objective = config.objective.model_copy(update={"adapter": adapter.model_copy(update={"init": str(init)})})
    return config.model_copy(update={"objective": objective})


class RayCheckpointStore:
    """Keeps states where Ray Train does: one counts once every worker has reported it."""

    @contextmanager
    def latest(self) -> Iterator[Path | None]:
        """Open the newest state that counts."""
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            yield None
        else:
            with checkpoint.as_directory() as folder:
                yield Path(folder)

    def save(self, write: Callable[[Path], None]) -> None:
        """Report a state; returns when it is stored."""
        with TemporaryDirectory() as folder:
            write(Path(folder))
            ray.train.report({}, checkpoint=Checkpoint.from_directory(folder))


def _check_cluster(config: TrainConfig) -> None:
    compute, resources = config.compute, ray.cluster_resources()
    for kind, each in (("CPU", compute.cpus_per_worker), ("GPU", int(compute.gpu))):
        wanted, there = compute.workers * each, resources.get(kind, 0)
        if wanted > there:
            raise ClusterError(
                f"{compute.workers} workers with {each} {kind} each need {wanted}, the cluster has {there:g}. "
                "Lower compute.workers or join a larger cluster with RAY_ADDRESS."
            )


@contextmanager
def _sigint(handle: Callable[[], None]) -> Iterator[None]:
    """Call `handle` on the first Ctrl-C; a second one ends the process as usual."""

    def on_sigint(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        handle()

    if threading.current_thread() is not threading.main_thread():  # the only one that signals reach
        yield
        return
    before = signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _show_progress(folder: RunFolder, progress: ProgressLine, thread: threading.Thread, asked: threading.Event) -> None:
    """Show how far the run is until it ends; once it is `asked` to stop, tell the workers."""
    steps = follow_metrics(folder.path)
    figures: dict[str, str] = {}
    while thread.is_alive():
        thread.join(POLL_S if isinstance(folder.path, Path) else STORE_POLL_S)
        if asked.is_set():
            folder.ask_to_stop()
            asked.clear()
        while (step := next(steps)) is not None:
            figures |= {"ar": f"{step.ar_loss:.3f}", "tokens/s": f"{step.tokens_per_s:.0f}"}
            if step.mask_loss is not None:
                figures["masks"] = f"{step.mask_loss:.3f}"
            if step.heldout_tokens_per_forward is not None:
                figures["held-out tokens/forward"] = f"{step.heldout_tokens_per_forward:.2f}"
            progress.update(step.step, figures, total=step.steps)
