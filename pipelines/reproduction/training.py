"""Train one recipe for one seed, in one process with one thread, and write a model folder.

A finished model is not trained again, and a run that was killed resumes from its last state.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from mars_ray.data.packed import PackedData
from mars_ray.method.streams import PackedRows
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from mars_ray.model.sources.store import folder_here
from mars_ray.training.config import TrainConfig, parse_config
from mars_ray.training.loop import TrainingRun
from mars_ray.training.run_folder import RunFolder
from mars_ray.training.schedule import generator_for, learning_rate, row_numbers, step_count
from pipelines.reproduction.baselines.block_diffusion import diffusion_loss
from pipelines.reproduction.baselines.medusa import MedusaHeads, train_heads
from pipelines.reproduction.recipes import Recipe

LENGTH = 256
"""Tokens per packed row."""
BATCH_ROWS = 8
CLIP_NORM = 1.0
HEADS_FILE = "medusa.safetensors"
MEMORY_STEPS = 4
STATES = "states"
"""Folder with the states to resume from."""


def random_draft(folder: Path, like: Path, seed: int) -> None:
    """Write a small network with random weights and the tokenizer of the model `like`."""
    torch.manual_seed(seed)
    large = AutoConfig.from_pretrained(like, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(like, trust_remote_code=False)
    network = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=large.vocab_size,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=large.max_position_embeddings,
            tie_word_embeddings=True,
            bos_token_id=large.bos_token_id,
            eos_token_id=large.eos_token_id,
            pad_token_id=large.pad_token_id,
        )
    )
    partial = folder.with_suffix(".partial")
    network.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def train_recipe(recipe: Recipe, start: Path, output: Path, seed: int) -> None:
    """Train on the packed data in `output/data` and write the model to `output/model`."""
    torch.set_num_threads(1)
    if not RunFolder(output).model.exists():
        {"streams": _streams, "diffusion": _diffusion, "medusa": _medusa}[recipe.kind](recipe, start, output, seed)


def peak_memory(recipe: Recipe, start: Path, data: Path, seed: int) -> int:
    """Return the bytes by which some training steps raise the peak memory of this process.

    Call this in a new process, because memory that the process has used before is not counted.
    """
    passes = MEMORY_STEPS * BATCH_ROWS / len(PackedData(data / "train"))
    with TemporaryDirectory() as output:
        (Path(output) / "data").symlink_to(data)
        before = _peak_memory()
        train_recipe(replace(recipe, passes=passes), start, Path(output), seed)
        return _peak_memory() - before


def _peak_memory() -> int:
    """Return the peak memory of this process; `getrusage` would include the memory of its parent."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def _streams(recipe: Recipe, start: Path, output: Path, seed: int) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    TrainingRun(_config(recipe, start, output, seed), start, accelerator, LocalStore(output / STATES)).run()


def _config(recipe: Recipe, start: Path, output: Path, seed: int) -> TrainConfig:
    return parse_config(
        {
            "model": str(start),
            "output": output,
            "data": {"train": "references", "heldout": "heldout", "length": LENGTH},
            "objective": recipe.objective,
            "optimizer": {
                "learning_rate": recipe.learning_rate,
                "epochs": recipe.passes,
                "batch_rows": BATCH_ROWS,
                "micro_rows": BATCH_ROWS,
                "clip_norm": CLIP_NORM,
            },
            "compute": {"precision": "bfloat16"},
            "measure_every": 100,
            "seed": seed,
        },
        recipe.name,
    )


def _diffusion(recipe: Recipe, start: Path, output: Path, seed: int) -> None:
    """Train with the diffusion loss; otherwise like a training run, in bfloat16."""
    checkpoint = load_checkpoint(start)
    data = PackedData(folder_here(RunFolder(output).train_data))
    network = checkpoint.network.train()
    block = recipe.objective["block"]
    optimizer = torch.optim.AdamW(network.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    steps = step_count(len(data), epochs=recipe.passes, batch_rows=BATCH_ROWS)
    for step, rows in enumerate(_batches(data, steps, seed)):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, peak=recipe.learning_rate, warmup=0.03)
        with torch.autocast("cpu", torch.bfloat16):
            loss = diffusion_loss(
                network,
                rows,
                block=block,
                mask_id=checkpoint.mask_id,
                stop_id=checkpoint.tokenizer.eos_token_id,
                generator=generator_for(seed, step),
            )
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
    # The model gets no card, because only this package can decode it.
    save_checkpoint(
        Checkpoint(network, checkpoint.tokenizer, checkpoint.mask_id, card=None), RunFolder(output).model_here()
    )


def _medusa(recipe: Recipe, start: Path, output: Path, seed: int) -> None:
    network = load_checkpoint(start, attention="sdpa").network.requires_grad_(requires_grad=False)
    data = PackedData(folder_here(RunFolder(output).train_data))
    torch.manual_seed(seed)
    heads = MedusaHeads(recipe.objective["heads"], network.get_output_embeddings().weight)
    steps = step_count(len(data), epochs=recipe.passes, batch_rows=BATCH_ROWS)
    train_heads(network, heads, _batches(data, steps, seed), steps=steps, learning_rate=recipe.learning_rate)
    partial = output / "model.partial"
    partial.mkdir(exist_ok=True)
    heads.save(partial / HEADS_FILE)
    partial.rename(RunFolder(output).model_here())


def _batches(data: PackedData, steps: int, seed: int) -> Iterator[PackedRows]:
    for step in range(steps):
        yield data.rows(row_numbers(step, len(data), batch_rows=BATCH_ROWS, seed=seed))


class LocalStore:
    """A `CheckpointStore` in a local folder, which keeps only the newest state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def latest(self) -> Iterator[Path | None]:
        """Open the newest complete state, or None if there is no state."""
        states = sorted(
            (path for path in self._folder.glob("[0-9]*") if not path.suffix), key=lambda path: int(path.name)
        )
        yield states[-1] if states else None

    def save(self, write: Callable[[Path], None]) -> None:
        """Write a state, and delete all earlier and incomplete states."""
        before = list(self._folder.glob("[0-9]*"))
        number = 1 + max((int(path.stem) for path in before), default=0)
        partial = self._folder / f"{number}.partial"
        partial.mkdir(parents=True)
        write(partial)
        partial.rename(self._folder / str(number))
        for path in before:
            shutil.rmtree(path)
