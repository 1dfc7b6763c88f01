"""Compile the decoding step with torch.compile in a child process, and load compiled steps from disk.

Steps run eagerly until their compiled variant is ready; without a compiler they stay eager. This process does not
compile, because tracing holds the interpreter lock and would slow down the steps.

Sizes are dynamic, but the compiler treats a size of 1 as a constant. So there are four variants: one or several slots,
with one or several positions. They are kept in the user's cache folder under a digest of the model configuration,
versions, processor and number of threads. Engines that start at the same time compile each variant only once.
"""

import fcntl
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from mars_ray.engine.execution import forward
from mars_ray.engine.execution.forward import Forward, forward_of
from mars_ray.engine.kv import attention, forward_batch
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.storage.private import is_private, private_folder

log = logging.getLogger(__name__)

CACHE = Path(".cache/mars-ray/compiled")
"""Folder of compiled steps in the user's home. Its files are executed, so no other account may write there."""

COMPILE_AFTER_STEPS = 500
"""Number of steps before compilation starts. Compiling takes minutes of processor time, which a short-lived engine
would not win back."""

VARIANTS = ((1, 1), (1, 6), (5, 6), (5, 1))
"""Number of slots and of positions in the example input of each variant. The most useful variants are compiled
first."""


class CompiledSteps:
    """Loads variants from disk, and compiles missing variants in a child process."""

    def __init__(self, network: PreTrainedModel, mask_id: int) -> None:
        self._network = network
        self._folder = Path.home() / CACHE / _key(network, mask_id)
        self._ready: dict[tuple[bool, bool], Forward] = {}
        self._child: subprocess.Popen[str] | None = None
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._steps = 0
        self._thread = threading.Thread(target=self._warm, args=(mask_id,), name="compiled", daemon=True)
        self._thread.start()

    def get(self, batch: ForwardBatch) -> Forward | None:
        """Return the variant for the sizes of `batch`, or None if it is not ready. Each call counts as one step."""
        self._steps += 1
        if self._steps == COMPILE_AFTER_STEPS:
            self._wanted.set()
        rows, positions = batch.where_RP.shape
        return self._ready.get((rows > 1, positions > 1))

    def wait(self) -> None:
        """Compile missing variants now, and wait until all variants are ready."""
        self._wanted.set()
        self._thread.join()

    def close(self) -> None:
        """Stop compiling."""
        self._closed.set()
        self._wanted.set()
        if self._child:
            self._child.kill()
        self._thread.join()

    def _warm(self, mask_id: int) -> None:
        try:
            if self._folder.exists():
                self._close_folder()
            missing = [variant for variant in VARIANTS if not self._load(*variant)]
            if missing and self._wanted.wait() and not self._closed.is_set():
                self._compile(missing, mask_id)
        except Exception as error:  # eager steps work without a compiler
            if not self._closed.is_set():
                log.warning("steps stay uncompiled: %s", (str(error).strip().splitlines() or [repr(error)])[-1])

    def _compile(self, missing: list[tuple[int, int]], mask_id: int) -> None:
        self._close_folder()
        self._network.config.save_pretrained(self._folder)
        dtype = str(self._network.dtype).removeprefix("torch.")
        arguments = (self._folder, mask_id, dtype, self._network.device.type, torch.get_num_threads())
        command = [sys.executable, "-P", "-m", __name__, *map(str, arguments)]
        # The child ends when its standard input closes, so it ends with this process even after a crash.
        with (
            TemporaryFile("w+") as complaints,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True
            ) as self._child,
        ):
            assert self._child.stdout is not None
            for name in self._child.stdout:  # the child prints the name of each variant on disk
                for variant in missing:
                    if _name(*variant) == name.strip():
                        self._load(*variant)
            if len(self._ready) < len(VARIANTS):
                complaints.seek(0)
                raise RuntimeError(complaints.read())

    def _close_folder(self) -> None:
        private_folder(self._folder, within=Path.home() / CACHE.parent)
        # The default folder of torch's compiler cache is in /tmp, where another account may have created it.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(private_folder(self._folder.parent / "inductor")))

    def _load(self, rows: int, positions: int) -> bool:
        path = self._folder / _name(rows, positions)
        if not is_private(path):
            return False
        with path.open("rb") as saved:
            step: Any = torch.compiler.load_compiled_function(saved, external_data={"network": self._network})
        step.disable_guard_check()
        self._ready[rows > 1, positions > 1] = step
        return True


def compile_variants(folder: Path, mask_id: int, dtype: torch.dtype, device: str) -> Iterator[tuple[int, int]]:
    """Compile missing variants into `folder`, which holds the model's configuration, and yield those on disk."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            network = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    finally:
        torch.set_default_dtype(before)
    network.to_empty(device=device).eval()  # weights are never written, so they take no memory
    network.tie_weights()
    network.set_attn_implementation(attention.ATTENTION)
    run = forward_of(network, mask_id)
    for rows, positions in VARIANTS:
        target = folder / _name(rows, positions)
        with _alone(folder):
            if not is_private(target):
                partial = target.with_suffix(".partial")
                step = compile_step(run, example(network, rows, positions))
                step.save_compiled_function(str(partial), external_data={"network": network})
                partial.chmod(0o600)  # regardless of the umask
                partial.replace(target)
        yield rows, positions


@torch.inference_mode()
def compile_step(run: Forward, inputs: tuple[Any, ...]) -> Any:
    """Compile `run` ahead of time, for inputs of any size with the same dynamic dimensions as `inputs`."""

    # Guard only sizes. An engine's weights, devices and dtypes never change, and checking them takes a tenth of a step.
    def sizes(guards: list[Any]) -> list[bool]:
        return [guard.guard_type == "SHAPE_ENV" for guard in guards]

    compiler: Any = torch.compile(run, fullgraph=True, options={"guard_filter_fn": sizes})
    return compiler.aot_compile((inputs, {}))


@torch.inference_mode()
def example(network: PreTrainedModel, rows: int, positions: int) -> tuple[Any, ...]:
    """Return example inputs with their own cache.

    All dynamic sizes differ from one another and from 1; otherwise the compiler would assume that they are always
    equal, or always 1.
    """
    width = 512
    columns = 77
    cache = SlotKVCache(network.config, network.dtype, network.device)
    cache.resize(rows + 7, width)
    count = rows * positions
    number_N = torch.arange(count, device=network.device)
    where_RP = number_N.view(rows, positions)
    column_C = torch.arange(columns, device=network.device)
    position_N = number_N % positions + columns - positions
    batch = ForwardBatch(
        id_N=number_N,
        slot_N=number_N // positions,
        position_N=position_N,
        target_N=position_N.clone(),
        prefix_N=position_N + 1,
        behind_N=torch.zeros_like(position_N),
        offset_N=torch.full_like(position_N, -1),
        adapter_N=torch.full_like(position_N, -1),
        back_N=number_N.clone(),
        pick_M=number_N[-max(2, count - 2) :].clone(),
        where_RP=where_RP,
        column_C=column_C,
        prefill=None,
        kv_tokens=0,
    )
    dynamic = [(tensor, dim) for layer in cache.layers for tensor in layer for dim in (0, 2)]
    per_position = [getattr(batch, field.name) for field in fields(batch) if field.name.endswith(("_N", "_M"))]
    dynamic += [(tensor, 0) for tensor in per_position] if count > 1 else []
    dynamic += [(where_RP, dim) for dim in (0, 1) if where_RP.shape[dim] > 1] + [(column_C, 0)]
    for tensor, dim in dynamic:
        torch._dynamo.mark_dynamic(tensor, dim)
    return cache.layers, batch


def _key(network: PreTrainedModel, mask_id: int) -> str:
    """Return a digest of everything that the compiled code depends on."""
    sources = [Path(str(module.__file__)).read_text() for module in (attention, forward, forward_batch)]
    processor = torch.cuda.get_device_name() if network.device.type == "cuda" else torch.cpu.get_capabilities()
    parts = [
        network.config.to_diff_dict() | {"_name_or_path": None, "transformers_version": transformers.__version__},
        [torch.__version__, str(network.dtype), str(processor), torch.get_num_threads(), mask_id, *sources],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _name(rows: int, positions: int) -> str:
    return f"{'rows' if rows > 1 else 'row'}-{'positions' if positions > 1 else 'position'}.bin"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder during the `with` block, so that no other process compiles the same variant."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Compile variants at low priority. Entry point of the child process."""
    folder, mask_id, dtype, device, threads = sys.argv[1:]
    os.nice(10)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(threads))
    for rows, positions in compile_variants(Path(folder), int(mask_id), getattr(torch, dtype), device):
        print(_name(rows, positions), flush=True)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
