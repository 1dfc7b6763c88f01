"""The model that rows are decoded with, and how: decided before any work, for files and for a stage of a pipeline."""

from dataclasses import dataclass, replace
from pathlib import Path

from mars_ray.adapter.card import AdapterCard, check_base, read_adapter_card, resolve_adapter, unnamed
from mars_ray.batch.run.control_plan import batch_plan
from mars_ray.batch.run.options import WorkerOptions
from mars_ray.control.policies.bounds import bounds_of
from mars_ray.control.settings import ControlPlan
from mars_ray.engine.mode import DEFAULT_THRESHOLD, Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.process.messages import EngineSpec
from mars_ray.engine.request import DecodeParams
from mars_ray.model.card import Card
from mars_ray.model.folder import ResolvedModel, open_model
from mars_ray.model.threads import suitable_threads

QUEUE = 1 << 16
"""Sequences that may wait in an engine: more than a worker ever adds."""
REQUEST_TOKENS = 1 << 40
"""Tokens that a request may ask for: who asks for many pays for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The engines of a job."""

    workers: WorkerOptions
    model: ResolvedModel
    """The model; its folder is absolute, because workers have another working folder."""
    adapter: Path | None
    """The folder of the adapter, absolute."""
    threads: int
    """Threads that suit the model on a CPU."""
    control: ControlPlan
    """What the controller goes by."""

    def spec(self, threads: int) -> EngineSpec:
        """Return the engine of a worker."""
        return EngineSpec(
            folder=self.model.folder,
            dtype=self.model.dtype.name,
            threads=threads,
            adapters=unnamed(self.adapter),
            options=EngineOptions(
                **self.workers.tuning,
                max_waiting_seqs=QUEUE,
                max_request_tokens=REQUEST_TOKENS,
                threshold=self.control.ceiling,
                classes=self.control.classes,
            ),
        )


def plan_engines(
    *,
    model: str,
    adapter: str | None,
    workers: WorkerOptions,
    decode: DecodeParams,
    deadline_s: float | None,
    max_quality_loss: float | None,
) -> tuple[EnginePlan, DecodeParams]:
    """Return the engines, and how rows are decoded that say nothing themselves.

    Raises an `InputError` for whatever is not usable.
    """
    workers.check()
    resolved = open_model(model, workers.dtype, workers.device)
    adapter_folder = resolve_adapter(adapter)
    card: Card | AdapterCard | None = resolved.card
    if adapter_folder is not None:
        card = read_adapter_card(adapter_folder)
        check_base(card, adapter_folder, resolved.folder)
    control, decode = _control(decode, card, deadline_s, max_quality_loss)
    threads = suitable_threads(resolved.folder)
    return EnginePlan(workers=workers, model=resolved, adapter=adapter_folder, threads=threads, control=control), decode


def _control(
    decode: DecodeParams, card: Card | AdapterCard | None, deadline_s: float | None, max_quality_loss: float | None
) -> tuple[ControlPlan, DecodeParams]:
    """Return what the controller goes by, and how rows are decoded that say nothing themselves.

    Only a job with a deadline leaves the threshold to the controller.
    """
    ceiling = DEFAULT_THRESHOLD if decode.threshold is None else decode.threshold
    plan = batch_plan(card, threshold=ceiling, deadline_s=deadline_s, max_quality_loss=max_quality_loss)
    if decode.mode is not Mode.THRESHOLD:
        return plan, decode  # no threshold changes what it answers
    if deadline_s is not None:
        return plan, replace(decode, threshold=None)
    if max_quality_loss is not None:
        [bounds] = bounds_of(plan, []).values()
        return plan, replace(decode, threshold=bounds.floor)
    return plan, replace(decode, threshold=ceiling)
