"""Ray shell: run a training with Ray Train and follow it from the command line.

Ray Train restarts dead workers and decides which checkpoint is the newest complete one; running the same config again
resumes from that checkpoint. `fit` runs in a thread while the main thread shows progress and turns Ctrl-C into a
request to save and stop.
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
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.exceptions import RayError
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from upath import UPath

from mars_ray.adapter.card import resolve_adapter
from mars_ray.adapter.gated_lora import linears_of
from mars_ray.data.packed import REPORT_FILE, read_report
from mars_ray.data.ray_prepare import PrepareOptions, prepare
from mars_ray.errors import ClusterError, InterruptedRunError, MarsRayError, ModelError, RunError, check_kind
from mars_ray.model.digest import folder_digest
from mars_ray.model.dtype import resolve_dtype
from mars_ray.model.folder import check_folder, count_parameters
from mars_ray.model.network import empty_network
from mars_ray.model.resolve import model_label, pin, resolve_model
from mars_ray.model.sources.ray_folder import SharedFolder, share_folder
from mars_ray.progress import ProgressLine
from mars_ray.ray_cluster import connect
from mars_ray.ray_private import reason_of
from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import write_folder
from mars_ray.training.config import TrainConfig, parse_config
from mars_ray.training.loop import TrainingRun, new_accelerator
from mars_ray.training.metrics import StepMetrics, follow_metrics, plot_metrics, read_metrics
from mars_ray.training.run_folder import RunFolder

POLL_S = 0.5
STORE_POLL_S = 2.0


def train(config: TrainConfig) -> StepMetrics:
    """Train to the end, resuming an earlier run of `config`; return the metrics of the last step.

    A finished run returns at once. Raises `ConfigError` if the output folder was made with other settings,
    `OutputError` if another process uses it, `ClusterError` if the cluster is too small, `DataError` for unusable data,
    `DivergedError` if the loss is not finite, `InterruptedRunError` after Ctrl-C, and `RunError` if workers keep dying.
    """
    check_kind("config", config, TrainConfig)
    base = resolve_model(config.model).absolute()
    # The dtype is resolved here, so that it is part of the run's settings and workers on other machines use the same
    # one.
    dtype = resolve_dtype(config.compute.precision, count_parameters(base), "cuda" if config.compute.gpu else "cpu")
    compute = config.compute.model_copy(update={"precision": dtype.name})
    # A branch on a hub may move, and workers have another working directory.
    fixed = {"model": pin(config.model, base), "output": config.output.absolute(), "compute": compute}
    config = config.model_copy(update=fixed)
    _check_target_modules(config, base)
    folder = RunFolder(config.output)
    with folder.only_driver():
        settings = _settings(config, base)
        if folder.begun:
            folder.check_settings(settings)
            for source, packed in _data(config, folder):
                folder.check_data(source, packed)
        if not folder.finished:
            print(f"train: {dtype.name}: {dtype.reason}", file=sys.stderr)
            connect()
            _check_cluster(config)
            _prepare_data(config, base, folder)
            if not folder.begun:
                folder.keep_settings(settings)
            _fit(config, base, folder)
        metrics = read_metrics(folder.path)
        plot_metrics(metrics, folder.picture)
        return metrics[-1]


def _check_target_modules(config: TrainConfig, base: Path) -> None:
    """Raise `AdapterError` if `target_modules` names a layer that the model lacks. A run checks this before it packs
    data and starts workers, which takes a minute."""
    adapter = config.objective.adapter
    if adapter and adapter.target_modules:
        model = check_folder(base)
        try:
            network = empty_network(model.config)
        except Exception as error:  # the sizes in config.json are untrusted
            raise ModelError(
                f"{base}: config.json describes no network: {error}. Download or save the model again."
            ) from error
        linears_of(network, adapter.target_modules)


def _settings(config: TrainConfig, base: Path) -> dict[str, Any]:
    """Return the settings that must be the same when a run is resumed. Digests replace folders, so that a run can
    resume on a machine with other folders. Workers and their resources may change, and so may the limit of dropped
    records, which affects no row."""
    settings: dict[str, Any] = config.model_dump(mode="json", exclude={"output": True, "data": {"max_dropped"}})
    settings["compute"] = {"precision": config.compute.precision}
    settings |= {"model": model_label(config.model, base), "model_digest": folder_digest(base)}
    if adapter := settings["objective"]["adapter"]:  # states of another number of masks have other shapes
        settings["objective"]["adapter"] = {"masks": config.objective.masks} | adapter
    if init := _init(config):
        settings["objective"]["adapter"]["init"] = folder_digest(init)
    return settings


def _init(config: TrainConfig) -> Path | None:
    """Return the folder of the adapter that training starts from, or None."""
    return resolve_adapter(config.objective.adapter.init) if config.objective.adapter else None


def _prepare_data(config: TrainConfig, base: Path, folder: RunFolder) -> None:
    """Pack the data, unless the run has begun with them, and report the records that were dropped."""
    data = config.data
    options = PrepareOptions(length=data.length, overlong=data.overlong, max_dropped=data.max_dropped)
    for source, packed in _data(config, folder):
        # Before a run has begun, its settings may change, and rows in its folder may come from others.
        if not folder.begun or read_report(packed) is None:
            with ProgressLine(f"tokenise {source.name}", total=None) as progress:
                pack = partial(prepare, source, model=base, options=options, progress=progress)
                write_folder(packed, pack, last=REPORT_FILE)
    for line in data_losses(config).values():
        print(f"train: {line}", file=sys.stderr)


def _data(config: TrainConfig, folder: RunFolder) -> list[tuple[AnyPath, AnyPath]]:
    """Return each data file with the folder of its packed rows."""
    return [(config.data.heldout, folder.heldout_data), (config.data.train, folder.train_data)]


def data_losses(config: TrainConfig) -> dict[str, str]:
    """Return a line about the dropped and truncated records of each data file of a run, by the path of the file."""
    reports = {source: read_report(packed) for source, packed in _data(config, RunFolder(config.output))}
    lines = {str(source): report.losses(source.name) for source, report in reports.items() if report}
    return {source: line for source, line in lines.items() if line}


def _fit(config: TrainConfig, base: Path, folder: RunFolder) -> None:
    outcome: list[ray.train.Result | BaseException] = []

    def fit() -> None:
        try:
            outcome.append(_trainer(config, base).fit())
        except BaseException as error:
            outcome.append(error)

    folder.begin_attempt()
    thread = threading.Thread(target=fit, daemon=True)
    interrupt = threading.Event()
    with _sigint(interrupt.set), ProgressLine("train", total=None) as progress:
        thread.start()
        _show_progress(folder, progress, thread, interrupt)
    result = outcome[0]
    if folder.finished:
        return
    folder.raise_reason()
    if isinstance(result, (ray.train.TrainingFailedError, RayError)):
        raise RunError(
            f"The run failed: {reason_of(result)}. Fix the cause and run the same command; it continues from the last "
            f"state that is saved in {folder.path}."
        ) from result
    if isinstance(result, BaseException):
        raise result
    steps = len(read_metrics(folder.path))
    raise InterruptedRunError(f"Stopped after {steps} steps, saved in {folder.path}. Run the same command to continue.")


def _trainer(config: TrainConfig, base: Path) -> TorchTrainer:
    compute = config.compute
    init = _init(config)
    parent = config.output.parent
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


def _worker(settings: dict[str, Any]) -> None:
    config = parse_config(settings["config"], "the driver")
    folder = RunFolder(config.output)
    if folder.has_reason:
        return  # Ray has restarted the workers although one of them gave up
    torch.set_num_threads(config.compute.cpus_per_worker)
    try:
        init: SharedFolder | None = settings["init"]
        if init:
            config = _starting_from(config, init.here())
        TrainingRun(config, settings["base"].here(), new_accelerator(config.compute), RayCheckpointStore()).run()
    except MarsRayError as error:
        # A retry would fail in the same way, so it ends at once, when it finds this reason.
        folder.give_up(error)
        if config.compute.workers > 1:
            raise  # the others wait for this worker until Ray ends them


def _starting_from(config: TrainConfig, init: Path) -> TrainConfig:
    adapter = config.objective.adapter
    assert adapter is not None
    objective = config.objective.model_copy(update={"adapter": adapter.model_copy(update={"init": str(init)})})
    return config.model_copy(update={"objective": objective})


class RayCheckpointStore:
    """Keeps states in the storage of Ray Train. A state is complete once every worker has reported it."""

    @contextmanager
    def latest(self) -> Iterator[Path | None]:
        """Open the newest complete state."""
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            yield None
        else:
            with checkpoint.as_directory() as folder:
                yield Path(folder)

    def save(self, write: Callable[[Path], None]) -> None:
        """Report a state, and return once it is stored."""
        with TemporaryDirectory() as folder:
            write(Path(folder))
            ray.train.report({}, checkpoint=Checkpoint.from_directory(folder))


def _check_cluster(config: TrainConfig) -> None:
    compute = config.compute
    resources = ray.cluster_resources()
    for kind, per_worker in (("CPU", compute.cpus_per_worker), ("GPU", int(compute.gpu))):
        needed = compute.workers * per_worker
        available = resources.get(kind, 0)
        if needed > available:
            raise ClusterError(
                f"{compute.workers} workers with {per_worker} {kind} each need {needed}; the cluster has "
                f"{available:g}. Lower compute.workers or join a larger cluster with RAY_ADDRESS."
            )


@contextmanager
def _sigint(handle: Callable[[], None]) -> Iterator[None]:
    """Call `handle` at the first Ctrl-C; a second Ctrl-C ends the process as usual."""

    def on_sigint(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        handle()

    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    before = signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _show_progress(
    folder: RunFolder, progress: ProgressLine, thread: threading.Thread, interrupt: threading.Event
) -> None:
    """Show the progress of the run until it ends, and pass an `interrupt` on to the workers."""
    steps = follow_metrics(folder.path)
    figures: dict[str, str] = {}
    while thread.is_alive():
        thread.join(POLL_S if isinstance(folder.path, Path) else STORE_POLL_S)
        if interrupt.is_set():
            folder.ask_to_stop()
            interrupt.clear()
        shown = None
        while (step := next(steps)) is not None:
            shown = step
            figures |= {"ar": f"{step.ar_loss:.3f}", "tokens/s": f"{step.tokens_per_s:.0f}"}
            if step.mask_loss is not None:
                figures["masks"] = f"{step.mask_loss:.3f}"
            if step.heldout_tokens_per_forward is not None:
                figures["held-out tokens/forward"] = f"{step.heldout_tokens_per_forward:.2f}"
        if shown:  # the steps before a resume come all at once, which is no speed
            progress.update(shown.step, figures, total=shown.steps)
