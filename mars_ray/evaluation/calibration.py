"""Calibrate a model or an adapter: measure it at each threshold, and write the results to its card.

Tokens per forward, agreement and accuracy are measured with spreads over samples, which have no prompts in common:
parts of a file, or examples of the task families with a seed of their own. Only the card changes, and it is replaced
atomically.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryFile

from rich.console import Console
from rich.table import Table

from mars_ray.adapter.card import AdapterCard, is_adapter, read_adapter_card, resolve_adapter, unnamed
from mars_ray.adapter.folder import Adapter, load_adapter
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.prompt_file import Conversation, read_prompts
from mars_ray.data.tasks import FAMILIES, is_right_answer
from mars_ray.data.tasks.family import TaskExample
from mars_ray.data.tasks.split import heldout_samples
from mars_ray.engine.checked_fields import Numbers, check_fields
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.load import best_device
from mars_ray.engine.core.offline import OfflineResult, decode_all
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import AtLeastOne, EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.engine.stats.grid import GRID
from mars_ray.errors import (
    BadRecordError,
    ConfigError,
    DataError,
    InterruptedRunError,
    ModelError,
    OutputError,
    RequestError,
    check_kind,
)
from mars_ray.evaluation.agreement import agreed_tokens
from mars_ray.evaluation.settings import ADAPTER_THRESHOLDS, settings_of
from mars_ray.evaluation.tasks import EXAMPLES_PER_FAMILY
from mars_ray.model.card import CARD_FILE, CalibrationPoint, Card, FamilyPoint, read_card, write_card
from mars_ray.model.checkpoint import Checkpoint, load_model
from mars_ray.model.folder import check_folder
from mars_ray.model.resolve import hub_name_of, resolve_model
from mars_ray.model.sources.node_cache import is_fetched
from mars_ray.progress import ProgressLine
from mars_ray.storage.location import AnyPath, PathOrUrl

CURVE_HEAD = ("threshold", "tokens per forward", "agreement", "accuracy")
THRESHOLDS = tuple(threshold for threshold in GRID if threshold >= 0.5)
"""Default thresholds for a model: the grid of the live profile from 0.5 upwards."""
FAMILIES_DATA = "built-in task families, held out"


@dataclass(frozen=True, slots=True)
class CalibrationPrompt:
    """A conversation to answer."""

    name: str
    """Name of the prompt in error messages."""
    sample: int
    messages: Conversation
    example: TaskExample | None = None
    """Task example with the reference answer; None for a prompt from a file."""


def family_prompts(per_family: int, seeds: range) -> list[CalibrationPrompt]:
    """Return the prompts of one sample per seed, each with `per_family` held-out examples of every family.

    Raises `ConfigError` if a family has too few examples.
    """
    samples = [heldout_samples(family, per_family, seeds) for family in FAMILIES.values()]
    return [
        CalibrationPrompt(f"{example.family}, seed {seed}", sample, example.messages, example)
        for sample, seed in enumerate(seeds)
        for of_family in samples
        for example in of_family[sample]
    ]


def heldout_examples(per_family: int, seed: int) -> list[TaskExample]:
    """Return `per_family` held-out examples of every family, none of which is a training prompt."""
    return [example for family in FAMILIES.values() for example in heldout_samples(family, per_family, [seed])[0]]


def file_prompts(path: AnyPath, per_sample: int | None, samples: int) -> list[CalibrationPrompt]:
    """Deal the prompts of a file to the samples in turn: `per_sample` to each, or all if `per_sample` is None.

    Raises `DataError` if the file has a bad record or fewer prompts than samples.
    """
    prompts = read_prompts(path)
    if len(prompts) < samples:
        raise DataError(f"{path} has too few prompts for {samples} samples: {len(prompts)}. Add some or lower --seeds.")
    if per_sample is not None:
        prompts = prompts[: per_sample * samples]
    return [
        CalibrationPrompt(f"{path}, record {number + 1}", number % samples, messages)
        for number, messages in enumerate(prompts)
    ]


@dataclass(frozen=True, slots=True)
class CalibrationCounts:
    """Counts over a set of answers."""

    examples: int
    tokens: int
    forwards: int
    agreed: int
    """Number of tokens that autoregressive decoding would also choose after the same prefix."""
    right: int
    """Number of correct answers; 0 if the prompts have no verifier."""

    @property
    def tokens_per_forward(self) -> float:
        """Tokens divided by forwards."""
        return self.tokens / self.forwards

    @property
    def agreement(self) -> float:
        """Share of the tokens that autoregressive decoding would also choose."""
        return self.agreed / self.tokens

    @property
    def accuracy(self) -> float:
        """Share of the answers that are correct."""
        return self.right / self.examples


def total_of(counts: Iterable[CalibrationCounts]) -> CalibrationCounts:
    """Return the sum of all counts."""
    parts = list(counts)
    return CalibrationCounts(
        examples=sum(count.examples for count in parts),
        tokens=sum(count.tokens for count in parts),
        forwards=sum(count.forwards for count in parts),
        agreed=sum(count.agreed for count in parts),
        right=sum(count.right for count in parts),
    )


def count_answers(
    checkpoint: Checkpoint,
    prompts: Sequence[CalibrationPrompt],
    decodes: Sequence[DecodeParams],
    sampling: SamplingParams,
    adapter: Adapter | None = None,
) -> list[list[CalibrationCounts]]:
    """Return one list per entry of `decodes`, with the counts of each prompt.

    Raises `DataError` in the same cases as `answer_prompts`.
    """
    with ProgressLine("decode", total=len(prompts) * len(decodes)) as progress:
        answers = answer_prompts(checkpoint, prompts, decodes, sampling, progress, adapter)
    distinct = list({(answer.request.prompt, tuple(answer.tokens)) for results in answers for answer in results})
    with ProgressLine("compare with autoregressive decoding", total=len(distinct)) as progress:
        counts = agreed_tokens(checkpoint.network, distinct, checkpoint.mask_id, progress)
    agreed = dict(zip(distinct, counts, strict=True))
    return [
        [
            CalibrationCounts(
                examples=1,
                tokens=len(answer.tokens),
                forwards=answer.forwards,
                agreed=agreed[answer.request.prompt, tuple(answer.tokens)],
                right=int(is_right(prompt, answer.text)),
            )
            for prompt, answer in zip(prompts, results, strict=True)
        ]
        for results in zip(*answers, strict=True)
    ]


def answer_prompts(
    checkpoint: Checkpoint,
    prompts: Sequence[CalibrationPrompt],
    decodes: Sequence[DecodeParams],
    sampling: SamplingParams,
    progress: ProgressLine,
    adapter: Adapter | None = None,
) -> list[list[OfflineResult]]:
    """Return the answers to each prompt, one for each entry of `decodes`.

    The block size is fixed (by default to the card's), so that answers do not depend on load or order. Raises
    `DataError`, before any work, for a prompt that the chat template refuses or that is too long.
    """
    options = EngineOptions(max_request_tokens=sampling.max_tokens)
    engine = Engine(checkpoint, options, adapters=unnamed(adapter))
    encoder = ChatEncoder(checkpoint.tokenizer)
    decodes = [replace(decode, block=decode.block or engine.block) for decode in decodes]
    encoded = [_encoded(prompt, encoder, engine, sampling) for prompt in prompts]
    results: dict[str, OfflineResult] = {}
    for decoded in decode_all(engine, _requests(encoded, sampling, decodes)):
        results[decoded.request.id] = decoded
        progress.update(len(results), {})
    return [[results[f"{number}/{rank}"] for rank in range(len(decodes))] for number in range(len(prompts))]


def _encoded(
    prompt: CalibrationPrompt, encoder: ChatEncoder, engine: Engine, sampling: SamplingParams
) -> tuple[int, ...]:
    try:
        tokens = tuple(encoder.prompt(prompt.messages))
        engine.limits.check(Request(id=prompt.name, prompt=tokens, sampling=sampling))
    except (BadRecordError, RequestError) as error:
        raise DataError(f"{prompt.name}: {error}") from None
    return tokens


def _requests(
    prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, decodes: Sequence[DecodeParams]
) -> Iterator[Request]:
    """Yield all requests for a prompt consecutively, so that they share the prompt in the cache."""
    for number, prompt in enumerate(prompts):
        for rank, decode in enumerate(decodes):
            yield Request(id=f"{number}/{rank}", prompt=prompt, sampling=sampling, decode=decode)


def is_right(prompt: CalibrationPrompt, text: str) -> bool:
    """Return True if the verifier of the prompt's family accepts the answer, and False if there is no verifier."""
    return prompt.example is not None and is_right_answer(prompt.example.family, prompt.example.answer, text)


_ByFamily = Mapping[str, CalibrationCounts]


def calibration_curve(
    checkpoint: Checkpoint,
    prompts: Sequence[CalibrationPrompt],
    thresholds: Sequence[float],
    sampling: SamplingParams,
    data: str,
    adapter: Adapter | None = None,
) -> tuple[CalibrationPoint, ...]:
    """Return one calibration point per threshold; `data` names the source of the prompts."""
    decodes = [DecodeParams(threshold=threshold) for threshold in thresholds]
    counts = count_answers(checkpoint, prompts, decodes, sampling, adapter)
    return tuple(
        _point(threshold, _samples(prompts, prompt_counts), data)
        for threshold, prompt_counts in zip(thresholds, counts, strict=True)
    )


def without_rounding(points: Sequence[CalibrationPoint]) -> tuple[CalibrationPoint, ...]:
    """Return the points with their agreement relative to that of threshold 1.

    Answers at threshold 1 are those of the engine one token at a time. Where the engine rounds otherwise than the
    network with which answers are compared, they agree in less than 100 %.
    """
    lossless = next(point.agreement for point in points if point.threshold == 1)
    return tuple(point.model_copy(update={"agreement": min(1.0, point.agreement / lossless)}) for point in points)


def _samples(prompts: Sequence[CalibrationPrompt], counts: Sequence[CalibrationCounts]) -> list[_ByFamily]:
    """Return one mapping per sample, from each family to its counts."""
    samples: dict[int, dict[str, list[CalibrationCounts]]] = defaultdict(lambda: defaultdict(list))
    for prompt, count in zip(prompts, counts, strict=True):
        samples[prompt.sample][prompt.example.family if prompt.example else ""].append(count)
    return [{name: total_of(family) for name, family in sample.items()} for sample in samples.values()]


def _point(threshold: float, samples: Sequence[_ByFamily], data: str) -> CalibrationPoint:
    families = [name for name in FAMILIES if any(name in sample for sample in samples)]
    by_family = {name: total_of(sample[name] for sample in samples if name in sample) for name in families or [""]}
    total = total_of(by_family.values())

    def spread(figure: Callable[[_ByFamily], float]) -> float | None:
        return stdev(map(figure, samples)) if len(samples) > 1 else None

    return CalibrationPoint(
        threshold=threshold,
        tokens_per_forward=total.tokens_per_forward,
        tokens_per_forward_std=spread(lambda sample: total_of(sample.values()).tokens_per_forward),
        agreement=total.agreement,
        agreement_std=spread(lambda sample: total_of(sample.values()).agreement),
        accuracy=_accuracy(by_family) if families else None,
        accuracy_std=spread(_accuracy) if families else None,
        examples=total.examples,
        tokens=total.tokens,
        seeds=len(samples),
        data=data,
        by_family={
            name: FamilyPoint(
                examples=by_family[name].examples,
                tokens_per_forward=by_family[name].tokens_per_forward,
                accuracy=by_family[name].accuracy,
            )
            for name in families
        },
    )


def _accuracy(by_family: _ByFamily) -> float:
    """Return the mean accuracy over families."""
    return fmean(count.accuracy for count in by_family.values())


def curve_row(point: CalibrationPoint) -> tuple[str, ...]:
    """Return the cells of one table row, in the order of `CURVE_HEAD`. ± is the standard deviation over samples."""
    return (
        f"{point.threshold:g}",
        f"{point.tokens_per_forward:.2f}{_spread(point.tokens_per_forward_std, '.2f')}",
        f"{point.agreement:.2%}{_spread(point.agreement_std, '.2%')}",
        "-" if point.accuracy is None else f"{point.accuracy:.1%}{_spread(point.accuracy_std, '.1%')}",
    )


def print_curve(points: Sequence[CalibrationPoint], title: str) -> None:
    """Print the points as a table, with the number and source of the examples."""
    point = points[0]
    samples = f"{point.seeds} samples" if point.seeds > 1 else "1 sample, so no spread"
    table = Table(title=title, caption=f"{point.examples} examples of {point.data} in {samples}")
    for name in CURVE_HEAD:
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(*curve_row(point))
    Console().print(table)


def _spread(value: float | None, form: str) -> str:
    return "" if value is None else f" ± {value:{form}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """Options of a calibration. Raises `ConfigError` for an option of a wrong type or out of range."""

    data: PathOrUrl | None = None
    """File of prompts, for which accuracy is not measured; None uses the built-in task families."""
    examples: AtLeastOne | None = None
    """Examples in each sample. None means `EXAMPLES_PER_FAMILY` per family, or all of the file."""
    seeds: AtLeastOne = 3
    """Number of samples over which spreads are computed: held-out examples with seeds 0, 1, …, or parts of the file."""
    max_tokens: AtLeastOne = 256
    thresholds: Numbers | None = None
    """None means `THRESHOLDS` for a model, and 1 and `ADAPTER_THRESHOLDS` for an adapter."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.thresholds is None:
            return
        if 1 not in self.thresholds:
            raise ConfigError(f"thresholds are {list(self.thresholds)}; add 1, because losses are measured against it.")
        settings_of([Mode.THRESHOLD], self.thresholds)


def calibrate(
    model: str | AnyPath, options: CalibrateOptions, adapter: str | Path | None = None
) -> tuple[CalibrationPoint, ...]:
    """Measure every threshold, and replace the calibration in the card of `adapter`, or of the model if there is no
    adapter.

    `model` and `adapter` are folders, or other names as in `GenerateOptions`. Raises an `InputError` if their card
    cannot be written to. Ctrl-C raises `InterruptedRunError` and leaves the card unchanged.
    """
    check_kind("options", options, CalibrateOptions)
    folder = resolve_model(model)
    adapter_folder = resolve_adapter(adapter)
    calibrated = adapter_folder or folder
    try:
        sampling = SamplingParams(max_tokens=options.max_tokens)
        card = writable_card(calibrated)
        loaded = load_adapter(adapter_folder, folder) if adapter_folder else None
        prompts = _prompts(options)
        device = best_device()
        # The model is loaded in the dtype that serving uses.
        checkpoint = load_model(check_folder(folder, device=device), device=device)
        data = options.data.name if options.data else FAMILIES_DATA
        usual = (1.0, *ADAPTER_THRESHOLDS) if loaded else THRESHOLDS
        thresholds = usual if options.thresholds is None else options.thresholds
        curve = without_rounding(calibration_curve(checkpoint, prompts, thresholds, sampling, data, loaded))
        write_card(card.model_copy(update={"calibration": curve}), calibrated)
    except KeyboardInterrupt:
        raise InterruptedRunError(f"Stopped; {calibrated / CARD_FILE} is unchanged.") from None
    return curve


def writable_card(folder: Path) -> Card | AdapterCard:
    """Return the card of a folder after checking that it can be replaced, because a measurement takes a long time.

    Raises `ModelError` or `OutputError` if it cannot.
    """
    if name := hub_name_of(folder.absolute()):
        raise ModelError(f"{name} is in the cache of the hub, which must stay unchanged. Copy {folder} first.")
    if is_fetched(folder):
        raise ModelError(f"{folder} is a fetched copy. Calibrate the original folder.")
    card = read_adapter_card(folder) if is_adapter(folder) else read_card(folder)
    if card is None:
        raise ModelError(f"{folder} has no {CARD_FILE} to write to; `mars-ray train` makes models that have one.")
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"Cannot write into {folder}: {error.strerror}. Copy it to a folder of your own.") from None
    return card


def _prompts(options: CalibrateOptions) -> list[CalibrationPrompt]:
    if options.data is not None:
        return file_prompts(options.data, options.examples, options.seeds)
    return family_prompts(options.examples or EXAMPLES_PER_FAMILY, range(options.seeds))
