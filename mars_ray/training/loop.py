"""The training loop of one worker: reads a model folder and writes a model folder.

The loop runs in a Ray worker or in a plain process. Only the `CheckpointStore` differs.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any, Protocol

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import broadcast
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from mars_ray.adapter import loss as adapter_loss
from mars_ray.adapter.card import AdapterCard
from mars_ray.adapter.folder import save_adapter, start_from
from mars_ray.adapter.gated_lora import GatedLoRA, new_adapter
from mars_ray.data.packed import PackedData
from mars_ray.errors import DivergedError
from mars_ray.method import tiles
from mars_ray.method.heldout import HeldoutLookahead, HeldoutMask, heldout_masks
from mars_ray.method.loss import StreamLoss
from mars_ray.method.streams import PADDING, Streams
from mars_ray.model.card import CARD_FILE, Card, library_versions
from mars_ray.model.checkpoint import load_checkpoint, save_checkpoint, save_folder
from mars_ray.model.digest import folder_digest, vocabulary_digest, weights_digest
from mars_ray.model.resolve import model_label
from mars_ray.model.sources.store import folder_here
from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import write_folder
from mars_ray.training.checkpoint import RunState, Trainee, load_state, save_state, shard, unsharded
from mars_ray.training.config import ComputeSection, TrainConfig
from mars_ray.training.metrics import StepMetrics, open_metrics
from mars_ray.training.micro_batches import MicroBatches
from mars_ray.training.run_folder import RunFolder
from mars_ray.training.schedule import generator_for, learning_rate, row_numbers, step_count
from mars_ray.training.step import keep_freed_memory, train_step


class CheckpointStore(Protocol):
    """Storage for the states of a run."""

    def latest(self) -> AbstractContextManager[Path | None]:
        """Open the folder of the newest complete state; the context gives None at the start of a run."""

    def save(self, write: Callable[[Path], None]) -> None:
        """Call `write` with an empty folder. The parts of all workers are kept as one state, or no part is kept."""


def new_accelerator(compute: ComputeSection) -> Accelerator:
    """Return the accelerator of a worker, whose process group exists already."""
    return Accelerator(
        cpu=not compute.gpu,
        mixed_precision={"float32": "no", "bfloat16": "bf16"}[compute.precision],
        # Otherwise DDP changes the layout of its gradients after the first step, and three or more workers add them in
        # another order: a resumed run would differ in the last bits from one that never stopped.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )


def _stop_dropout(network: nn.Module) -> None:
    """Let layers drop nothing by themselves where they are trained for their checkpoints. Rates are fields of their
    own, or of the config."""
    for part in (network.config, *network.modules()):
        for name, value in vars(part).items():
            if isinstance(value, float) and "drop" in name:
                setattr(part, name, 0.0)


class TrainingRun:
    """The part of a run that one worker executes."""

    def __init__(self, config: TrainConfig, base: Path, accelerator: Accelerator, store: CheckpointStore) -> None:
        """`base` is the folder of `config.model` on this machine."""
        self._config = config
        self._accelerator = accelerator
        self._store = store
        self._folder = RunFolder(config.output)
        self._data = PackedData(folder_here(self._folder.train_data))
        self._heldout = PackedData(folder_here(self._folder.heldout_data))
        self._base = base
        self._checkpoint = load_checkpoint(
            self._base,
            dtype=torch.bfloat16
            if config.objective.adapter and config.compute.precision == "bfloat16"
            else torch.float32,
            attention="sdpa",
        )
        if accelerator.device.type == "cpu":
            # Networks for which this attention would give wrong results were already refused when they were loaded with
            # SDPA.
            self._checkpoint.network.set_attn_implementation(tiles.ATTENTION)
            keep_freed_memory()
        self._adapter = self._new_adapter()
        optimizer = config.optimizer
        self._saved_best = 0
        """`best_steps` of the state that was saved last."""
        self._steps = step_count(len(self._data), epochs=optimizer.epochs, batch_rows=optimizer.batch_rows)
        self._batches = MicroBatches(config, self._steps, self._checkpoint.mask_id)
        self._loss, self._trainee = self._prepare()

    def _prepare(self) -> tuple[nn.Module, Trainee]:
        """Put the network on its device, whole or as a shard, and return its loss and its optimizer."""
        config = self._config
        network = self._checkpoint.network
        adapter = self._adapter
        if adapter:
            _stop_dropout(network)
        weights = (config.objective.distill, config.objective.total_variation)
        loss = adapter_loss.AdapterLoss(network, adapter, *weights) if adapter else StreamLoss(network, *weights)
        if config.compute.activation_checkpointing:
            # The backward computes layers again when the adapter is closed, so it must open it.
            contexts = {"context_fn": lambda: (nullcontext(), adapter.at(None))} if adapter else {}
            network.activation_checkpointing_enable({"use_reentrant": False} | contexts)
        sharded = config.compute.sharding == "fsdp"
        if sharded:
            shard(network, self._accelerator)
        else:
            network.to(self._accelerator.device)
        optimizer = torch.optim.AdamW(
            (adapter or network).parameters(),
            lr=config.optimizer.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )
        if sharded and not adapter:
            return loss, Trainee(network, optimizer, sharded=True)
        loss, optimizer = self._accelerator.prepare(loss, optimizer)
        return loss, Trainee(network, optimizer, sharded=False)

    def _new_adapter(self) -> GatedLoRA | None:
        section = self._config.objective.adapter
        if section is None:
            return None
        network = self._checkpoint.network
        with torch.random.fork_rng():
            torch.manual_seed(self._config.seed)
            adapter = new_adapter(
                network,
                rank=section.rank,
                alpha=section.alpha or 2.0 * section.rank,
                masks=self._config.objective.masks,
                names=section.target_modules,
            )
        if section.init:
            start_from(adapter, Path(section.init))
        return adapter

    def run(self) -> RunState:
        """Train from the newest saved state to the end or until a request to stop, and save the final state.

        An adapter is that of the best measurement, a model that of the last step. Raises `DivergedError` if the loss is
        not finite.
        """
        with self._store.latest() as folder:
            state = load_state(folder, self._trainee, self._accelerator) if folder else RunState()
        self._saved_best = state.best_steps
        main = self._accelerator.is_main_process
        losses: dict[str, float] = {}
        with open_metrics(self._folder.path, state.steps) if main else nullcontext() as writer:
            while not (ended := self._has_ended(state)) and not self._must_stop():
                state, metrics = self._step(state)
                losses = {"ar": metrics.ar_loss} | ({} if metrics.mask_loss is None else {"mask": metrics.mask_loss})
                if metrics.is_best and not (self._folder.best(state.steps) / CARD_FILE).exists():
                    self._write(self._folder.best(state.steps), state, losses)
                if writer:
                    writer.write(metrics)
                if state.steps % self._config.checkpoint_every == 0 and not self._has_ended(state):
                    if writer:
                        # A worker that resumes from this state writes only later lines, so all lines up to now must be
                        # stored.
                        writer.flush()
                    self._save(state)
        if not ended:
            self._save(state)
        elif not state.best_steps:
            self._write(self._folder.model, state, losses)
        elif main:
            best = folder_here(self._folder.best(state.best_steps))
            copy = partial(save_folder, write=partial(copytree, best, dirs_exist_ok=True))
            write_folder(self._folder.model, copy, last=CARD_FILE)
        return state

    def _has_ended(self, state: RunState) -> bool:
        """Return whether all steps are done, or the measurements have not become better for long."""
        patience = self._config.patience
        without_better = (state.steps - state.best_steps) // self._config.measure_every
        return state.steps >= self._steps or (patience is not None and without_better >= patience)

    def _step(self, state: RunState) -> tuple[RunState, StepMetrics]:
        started_s = time.perf_counter()
        optimizer = self._config.optimizer
        numbers = row_numbers(state.steps, len(self._data), batch_rows=optimizer.batch_rows, seed=self._config.seed)
        rows = self._data.rows(numbers)
        rate = learning_rate(state.steps, self._steps, peak=optimizer.learning_rate, warmup=optimizer.warmup)
        for group in self._trainee.optimizer.param_groups:
            group["lr"] = rate
        self._enter_training(state.steps)
        try:
            losses = train_step(
                self._loss,
                self._trainee.optimizer,
                self._batches.of_step(
                    rows,
                    state.steps,
                    worker=self._accelerator.process_index,
                    workers=self._accelerator.num_processes,
                ),
                self._accelerator,
                ar_weight=self._config.objective.ar_weight,
                clip_norm=optimizer.clip_norm,
            )
        except DivergedError as error:
            raise DivergedError(
                f"Step {state.steps + 1} of {self._steps}: {error}, at learning rate {rate:.2e}. Lower "
                "optimizer.learning_rate or raise optimizer.warmup, and start in a new output folder."
            ) from None
        tokens = int((rows.example_RT != PADDING).sum())
        seconds = time.perf_counter() - started_s
        state = replace(state, steps=state.steps + 1, tokens=state.tokens + tokens)
        due = state.steps % self._config.measure_every == 0 or state.steps == self._steps
        ahead = self._agreed(self._look_ahead()) if due else None
        # A model that is trained as a whole agrees with itself most while it knows little, so its last state counts.
        is_best = bool(ahead and self._adapter and ahead.tokens_per_forward > state.best_tokens_per_forward)
        if ahead and is_best:
            state = replace(state, best_steps=state.steps, best_tokens_per_forward=ahead.tokens_per_forward)
        return state, StepMetrics(
            step=state.steps,
            steps=self._steps,
            mask_loss=losses.mask_loss,
            ar_loss=losses.ar_loss,
            learning_rate=rate,
            grad_norm=losses.grad_norm,
            tokens_per_s=tokens / seconds,
            heldout_tokens_per_forward=ahead.tokens_per_forward if ahead else None,
            heldout_agreement=ahead.by_offset if ahead else None,
            is_best=is_best,
        )

    def _enter_training(self, step: int) -> None:
        network = self._checkpoint.network
        network.train(not self._adapter)  # the base of an adapter stays what it is
        if self._adapter and self._config.compute.activation_checkpointing:
            for module in network.modules():
                if isinstance(module, GradientCheckpointingLayer):
                    module.training = True
        # Dropout draws from torch's own generator.
        torch.manual_seed(generator_for(self._config.seed, step).initial_seed() + self._accelerator.process_index)

    def _look_ahead(self) -> HeldoutLookahead | None:
        """Measure the held-out rows on every worker, because a forward of a sharded network needs all workers."""
        if self._config.objective.kind == "ar":
            return None
        rows = self._heldout.rows(range(min(self._config.measure_rows, len(self._heldout))))
        self._checkpoint.network.eval()
        masks: list[HeldoutMask] = []
        for streams in self._batches.of_heldout(rows):
            with self._accelerator.autocast():
                masks += self._right_masks(streams.to(self._accelerator.device))
        return HeldoutLookahead.of(masks)

    def _agreed(self, ahead: HeldoutLookahead | None) -> HeldoutLookahead | None:
        """Return the figures of the main worker. Unlike hardware may differ in a token, but all must stop together."""
        if ahead is None:
            return None
        figures = torch.tensor(
            [ahead.tokens_per_forward, *ahead.by_offset], dtype=torch.float64, device=self._accelerator.device
        )
        tokens_per_forward, *by_offset = broadcast(figures).tolist()
        return HeldoutLookahead(tokens_per_forward, by_offset)

    def _right_masks(self, streams: Streams) -> list[HeldoutMask]:
        network = self._checkpoint.network
        if self._adapter:
            return adapter_loss.heldout_masks(network, self._adapter, streams)
        return heldout_masks(network, streams, block=self._config.objective.masks)

    def _must_stop(self) -> bool:
        request = torch.tensor(int(self._folder.asked_to_stop()), device=self._accelerator.device)
        return bool(self._accelerator.reduce(request))  # all workers stop at the same step

    def _save(self, state: RunState) -> None:
        self._store.save(lambda folder: save_state(folder, state, self._trainee, self._accelerator))
        if state.best_steps and self._accelerator.is_main_process:
            # The state before may still be the newest that is complete, because other workers have not stored theirs.
            self._folder.keep_best({state.best_steps, self._saved_best})
        self._saved_best = state.best_steps

    def _write(self, folder: AnyPath, state: RunState, losses: dict[str, float]) -> None:
        """Write the model, whose weights are gathered first if they are sharded."""
        network = self._checkpoint.network
        whole = unsharded(network) if self._trainee.sharded else network
        if whole is None or not self._accelerator.is_main_process:
            return
        save: Callable[[Path], None]
        if self._adapter:
            save = partial(save_adapter, self._adapter, self._adapter_card(state, losses))
        else:
            trained = replace(self._checkpoint, network=whole, card=self._model_card(state, losses))
            save = partial(save_checkpoint, trained)
        write_folder(folder, save, last=CARD_FILE)

    def _model_card(self, state: RunState, losses: dict[str, float]) -> Card:
        objective = self._config.objective
        mars = objective.kind == "mars"
        return Card(
            method=objective.kind,
            block=objective.block if mars else None,
            objective=objective.model_dump(exclude={"kind", "block", "adapter"}) if mars else {},
            mask_token=self._checkpoint.tokenizer.convert_ids_to_tokens(self._checkpoint.mask_id),
            mask_token_id=self._checkpoint.mask_id,
            **self._card_fields(state, losses),
        )

    def _adapter_card(self, state: RunState, losses: dict[str, float]) -> AdapterCard:
        objective = self._config.objective
        init = objective.adapter.init if objective.adapter else None
        return AdapterCard(
            block=objective.block,
            objective=objective.model_dump(include={"growth", "phase", "decay", "distill", "total_variation"}),
            base_digest=weights_digest(self._base),
            base_vocabulary=vocabulary_digest(self._base),
            init_digest=folder_digest(Path(init)) if init else None,
            **self._card_fields(state, losses),
        )

    def _card_fields(self, state: RunState, losses: dict[str, float]) -> dict[str, Any]:
        """Return the fields that both kinds of card share."""
        return {
            "base_model": model_label(self._config.model, self._base),
            "data": self._config.data.train.name,
            "examples": self._data.report.examples,
            "tokens": state.tokens,
            "steps": state.steps,
            "seed": self._config.seed,
            "versions": library_versions(),
            "losses": losses,
        }
