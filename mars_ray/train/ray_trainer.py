"""Place the workers of a run with Ray Train and follow it from the command line (shell).

Ray Train restarts dead workers and decides which checkpoint counts; running the same config again goes on from
there. `fit` runs in a thread: the main thread shows progress and turns Ctrl-C into a request to save and stop.
"""

import fcntl
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import ray.train
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from mars_ray import errors
from mars_ray.data.packed import read_report
from mars_ray.data.ray_prepare import PrepareOptions, prepare
from mars_ray.errors import ClusterError, ConfigError, InterruptedRunError, MarsRayError, OutputError, RunError
from mars_ray.model.resolve import resolve_model
from mars_ray.progress import ProgressLine
from mars_ray.ray_cluster import connect
from mars_ray.train.config import TrainConfig, parse_config
from mars_ray.train.loop import STOP_FILE, TrainingRun, model_folder
from mars_ray.train.metrics import StepMetrics, follow_metrics, plot_metrics, read_metrics

SETTINGS_FILE = "settings.json"
ERROR_FILE = "error.json"
"""Why the workers of the last attempt gave up, when it was no accident."""
POLL_S = 0.5


def train(config: TrainConfig) -> StepMetrics:
    """Run `config` to its end, from where an earlier run of it stopped; return the figures of the last step.

    A finished run returns at once. Raises `ConfigError` when the output folder belongs to other settings,
    `OutputError` when another process works in it, `ClusterError` for too small a cluster, `DataError` for unusable
    data, `DivergedError` and `InterruptedRunError` as they say, and `RunError` when workers keep dying.
    """
    # Workers have another working folder.
    absolute = {"model": str(resolve_model(config.model).absolute()), "output": config.output.absolute()}
    config = config.model_copy(update=absolute)
    config.output.mkdir(parents=True, exist_ok=True)
    with _only_driver(config.output):
        _check_settings(config)
        if not model_folder(config).exists():
            connect()
            _check_cluster(config)
            prepare_data(config)
            _fit(config)
        metrics = read_metrics(config.output)
        plot_metrics(metrics, config.output / "metrics.png")
        return metrics[-1]


def prepare_data(config: TrainConfig) -> None:
    """Tokenise and pack what `config` names, unless that is done."""
    data = config.data
    options = PrepareOptions(length=data.length, overlong=data.overlong, bad_records=data.bad_records)
    for source, name in ((data.heldout, "heldout"), (data.train, "train")):
        folder = config.output / "data" / name
        if read_report(folder) is None:
            with ProgressLine(f"tokenise {source.name}", total=None) as progress:
                prepare(source, folder, Path(config.model), options, progress)


def _fit(config: TrainConfig) -> None:
    outcome: list[ray.train.Result | BaseException] = []

    def fit() -> None:
        try:
            outcome.append(_trainer(config).fit())
        except BaseException as error:
            outcome.append(error)

    stop, error_file = config.output / STOP_FILE, config.output / ERROR_FILE
    stop.unlink(missing_ok=True)
    error_file.unlink(missing_ok=True)
    thread = threading.Thread(target=fit, daemon=True)
    with _sigint(stop.touch), ProgressLine("train", total=None) as progress:
        thread.start()
        _show_progress(config.output, progress, thread)
    result = outcome[0]
    if isinstance(result, ray.train.TrainingFailedError):
        raise RunError(
            f"The run failed: {_last_line(str(result))}. Its state is saved in {config.output}; mend the cause and run "
            "the same command to go on."
        ) from result
    if isinstance(result, BaseException):
        raise result
    if error_file.exists():
        error = json.loads(error_file.read_text())
        raise getattr(errors, error["kind"])(error["message"])
    if not model_folder(config).exists():
        done = read_metrics(config.output)[-1]
        raise InterruptedRunError(
            f"Stopped at step {done.step} of {done.steps}, saved in {config.output}. Run the same command to go on."
        )


def _trainer(config: TrainConfig) -> TorchTrainer:
    compute = config.compute
    return TorchTrainer(
        _worker,
        train_loop_config=config.model_dump(mode="json"),
        scaling_config=ScalingConfig(
            num_workers=compute.workers,
            use_gpu=compute.gpu,
            resources_per_worker={"CPU": compute.cpus_per_worker} | ({"GPU": 1} if compute.gpu else {}),
        ),
        run_config=RunConfig(
            name=config.output.name,
            storage_path=str(config.output.parent),
            failure_config=FailureConfig(max_failures=compute.worker_restarts),
            checkpoint_config=CheckpointConfig(num_to_keep=config.checkpoints_kept),
        ),
    )


def _worker(fields: dict[str, object]) -> None:
    config = parse_config(fields, "the driver")
    torch.set_num_threads(config.compute.cpus_per_worker)
    accelerator = Accelerator(
        cpu=not config.compute.gpu,
        mixed_precision={"float32": "no", "bfloat16": "bf16"}[config.compute.precision],
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if config.compute.sharding == "fsdp" else None,
    )
    try:
        TrainingRun(config, accelerator, RayCheckpointStore()).run()
    except MarsRayError as error:
        # Trying again would end the same way, so it must not look like a worker's death to Ray.
        report = {"kind": type(error).__name__, "message": str(error)}
        (config.output / ERROR_FILE).write_text(json.dumps(report))


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


def _check_settings(config: TrainConfig) -> None:
    """Refuse to go on with other settings than the run began with; nothing in its checkpoints would tell."""
    path, settings = config.output / SETTINGS_FILE, config.model_dump_json(indent=2) + "\n"
    if not path.exists():
        path.write_text(settings)
    elif path.read_text() != settings:
        began = dict(zip(path.read_text().splitlines(), settings.splitlines(), strict=False))
        was, now = next((old.strip(" ,"), new.strip(" ,")) for old, new in began.items() if old != new)
        raise ConfigError(
            f"{config.output} holds a run with other settings: {was} there, {now} now. Choose another output folder."
        )


@contextmanager
def _only_driver(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"Another process is training in {folder}. Wait for it, or choose another output."
            ) from None
        yield


@contextmanager
def _sigint(handle: Callable[[], None]) -> Iterator[None]:
    """Call `handle` on the first Ctrl-C; a second one ends the process as usual."""

    def on_sigint(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        handle()

    before = signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _show_progress(folder: Path, progress: ProgressLine, thread: threading.Thread) -> None:
    figures = follow_metrics(folder)
    while thread.is_alive():
        thread.join(POLL_S)
        latest = None
        while (step := next(figures)) is not None:
            latest = step
        if latest is not None:
            progress.update(latest.step, _figures(latest), total=latest.steps)


def _figures(step: StepMetrics) -> dict[str, str]:
    figures = {"ar": f"{step.ar_loss:.3f}", "tokens/s": f"{step.tokens_per_s:.0f}"}
    if step.mask_loss is not None:
        figures["masks"] = f"{step.mask_loss:.3f}"
    return figures


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
