"""A request to the engine: prompt, sampling, lookahead and stop conditions.

Values are checked when a request is created. `core/limits` checks the limits that depend on the model.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from enum import StrEnum
from hashlib import blake2b
from numbers import Integral
from reprlib import repr as shortened
from typing import TypeVar

from mars_ray.engine.checked_fields import items_of, set_plain_numbers
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.mode import Mode
from mars_ray.engine.service_class import STANDARD
from mars_ray.errors import RequestError
from mars_ray.method.metric import Metric, accepts_nothing, passes

EnumT = TypeVar("EnumT", bound=StrEnum)
STOP_STRINGS_MAX = 64
STOP_CHARACTERS_MAX = 256
TOP_LOGPROBS_MAX = 20
N_MAX = 64
NATS_MAX = 1e6
"""Maximum entropy threshold in nats. No distribution over a vocabulary has this much entropy, so it accepts every
token."""


@dataclass(frozen=True, slots=True)
class NumberLimits:
    """Limits of a sampling parameter that is a number."""

    low: float
    high: float
    above: bool = False
    """Whether `low` itself is out of range."""


def _number(default: float, low: float, high: float, *, above: bool = False) -> float:
    """Declare a number that has the same name and limits here, in the HTTP API, in rows of jobs and in vLLM."""
    number: float = field(default=default, metadata={"limits": NumberLimits(low, high, above)})
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters and stop conditions. Raises `RequestError` for values out of range."""

    max_tokens: int = 256
    """Maximum number of generated tokens; the context length of the model may end an answer earlier. It may be 0 with
    `prompt_logprobs`, to score a prompt without an answer."""
    min_tokens: int = 0
    """Minimum number of tokens before a stop token or a stop string may end the sequence. A completed grammar ends the
    sequence regardless."""
    temperature: float = 0.0
    """Sampling temperature; 0 always chooses the most likely token."""
    top_p: float = _number(1.0, 0, 1, above=True)
    """Draw from the smallest set of most likely tokens whose total probability reaches this value."""
    top_k: int = 0
    """Draw from this many of the most likely tokens; 0 means all tokens."""
    min_p: float = _number(0.0, 0, 1)
    """Leave out tokens whose probability is below this fraction of the highest probability."""
    seed: int | None = None
    """Seed of the draws; None lets the engine choose a seed."""
    n: int = 1
    """Number of answers; answer k draws with seed + k."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer. The text ends before the stop string, but the tokens include it."""
    stop_token_ids: frozenset[int] = frozenset()
    """Token ids that end the sequence, in addition to the model's own stop tokens. The stop token is returned but adds
    no text."""
    ignore_eos: bool = False
    """Whether to continue after the model's own stop tokens."""
    logprobs: int | None = None
    """Number of most likely tokens to return log-probabilities for, besides the chosen token. With None, none are
    returned."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to return log-probabilities for at each token of the prompt, besides that token.
    With None, none are returned."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Number to add to the logit of each token id."""
    presence_penalty: float = _number(0.0, -2, 2)
    """Number to subtract once from the logit of each token that was already generated."""
    frequency_penalty: float = _number(0.0, -2, 2)
    """Number to subtract from the logit of a token for each time that it was already generated."""
    repetition_penalty: float = _number(1.0, 0.01, 100)
    """Factor for tokens that the prompt or output already contains: divides their logits if positive, and multiplies
    them if negative (arXiv 1909.05858)."""
    skip_special_tokens: bool = True
    """Whether the text leaves out special tokens of the vocabulary. Stop tokens never add text."""
    grammar: GrammarSpec | None = None
    """Grammar that the text must follow. `max_tokens` and stop strings may cut the text before it is complete."""

    def __post_init__(self) -> None:
        set_plain_numbers(self)
        object.__setattr__(self, "stop", _stops(self.stop))
        stop_ids = list(self.stop_token_ids) if isinstance(self.stop_token_ids, Set) else self.stop_token_ids
        object.__setattr__(self, "stop_token_ids", frozenset(token_ids("stop_token_ids", stop_ids)))
        _check_int("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_number("temperature", self.temperature, 0, 100)
        _check_int("top_k", self.top_k, 0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1)
        _check_int("n", self.n, 1, N_MAX)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check_int(name, count, 0, TOP_LOGPROBS_MAX)
        for name, limits in NUMBERS.items():
            _check_number(name, getattr(self, name), limits.low, limits.high, above=limits.above)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} is {shortened(value)}; it must be true or false.")
        for token in self.stop_token_ids:
            _check_int("a token of stop_token_ids", token, 0, param="stop_token_ids")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias is {shortened(self.logit_bias)}; it must map token ids to numbers.")
        for token, bias in self.logit_bias.items():
            _check_int("a token of logit_bias", token, 0, param="logit_bias")
            _check_number(f"logit_bias of token {token}", bias, -100, 100, param="logit_bias")
        if self.grammar is not None and not isinstance(self.grammar, GrammarSpec):
            raise RequestError(f"grammar is {shortened(self.grammar)}; it must be a GrammarSpec.")


NUMBERS: Mapping[str, NumberLimits] = {
    parameter.name: parameter.metadata["limits"] for parameter in fields(SamplingParams) if parameter.metadata
}
"""Limits of the parameters made by `_number`. The HTTP API, rows of jobs and vLLM pass these parameters on by name."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The condition for keeping tokens that are not the model's own choice.

    A model trained on masks decides before verification: tokens at the masks of one forward are accepted while their
    confidences pass the threshold. With an adapter the model decides at verification, because the adapter knows less
    than the model (`lenient`). The first token that falls short, and all tokens after it, become drafts, which the next
    forward verifies. Wrong drafts cost time but change no answer, so only their cost limits their number.
    """

    threshold: float
    metric: Metric
    lenient: bool = False
    """Whether the threshold applies to drafts: one is kept if the model finds it at least `threshold` times as likely
    as the most likely token (lenience, arXiv 2211.17192, appendix A.5). Then no token escapes verification."""

    def accepts(self, confidence: float) -> bool:
        """Return whether a token at a mask with this confidence needs no verification."""
        return not self.lenient and passes(confidence, self.threshold, self.metric)

    def keeps(self, ratio: float) -> bool:
        """Return whether to keep a draft whose probability is `ratio` times that of the most likely token.

        A draft without any probability is never kept.
        """
        return self.lenient and not self.lossless and ratio >= self.threshold and ratio > 0

    @property
    def lossless(self) -> bool:
        """Whether only tokens are kept that are the model's own choice."""
        return accepts_nothing(self.threshold, self.metric)


LOSSLESS = Acceptance(1.0, Metric.PROBABILITY)
"""Acceptance in exact mode and at threshold 1: every proposed token is verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParams:
    """Decoding mode and lookahead. Raises `RequestError` for values out of range."""

    mode: Mode = Mode.THRESHOLD
    threshold: float | None = None
    """What a token ahead must reach to be kept (see `Acceptance`): 0 to 1 for probability and margin, nats for entropy.
    At 1, or 0 nats, answers are those of exact mode. Modes ar and exact ignore the threshold. None follows the engine's
    own threshold, which may change between steps."""
    floor: float | None = None
    """Lower bound on the engine's threshold for this request; only allowed without a `threshold`."""
    metric: Metric = Metric.PROBABILITY
    block: int | None = None
    """Number of tokens proposed per forward: the autoregressive token and block - 1 tokens at masks. None lets the
    engine choose the fastest block for each step, up to the block that the model was trained with."""
    adapter: str | None = None
    """Name of the adapter that decodes the masks. None uses the engine's unnamed adapter, or the model itself if the
    engine has no unnamed adapter. In mode ar, or when every token is verified, the adapter changes no answer."""

    def __post_init__(self) -> None:
        set_plain_numbers(self)
        object.__setattr__(self, "mode", _choice("mode", self.mode, Mode))
        object.__setattr__(self, "metric", _choice("metric", self.metric, Metric))
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise RequestError(f"adapter is {shortened(self.adapter)}; it must be the name of an adapter.")
        if self.threshold is not None:
            _check_number("threshold", self.threshold, 0, NATS_MAX if self.metric is Metric.ENTROPY else 1)
        elif self.metric is not Metric.PROBABILITY:
            raise RequestError(f"metric {self.metric.value} needs a threshold: the engine's own is a probability.")
        if self.floor is not None:
            _check_number("floor", self.floor, 0, 1)
            if self.threshold is not None:
                raise RequestError(f"threshold is {self.threshold} and floor {self.floor}; give one of them.")
        if self.block is not None:
            _check_int("block", self.block, 1, 64)

    def acceptance(self, engine_threshold: float, *, lenient: bool = False) -> Acceptance | None:
        """Return the condition for keeping tokens, given the engine's threshold; None without masks.

        `lenient` says that thresholds on the probability apply to drafts.
        """
        if self.mode is Mode.AR:
            return None
        threshold = max(engine_threshold, self.floor or 0.0) if self.threshold is None else self.threshold
        metric = self.metric
        if self.mode is Mode.EXACT or accepts_nothing(threshold, metric):
            threshold, metric = LOSSLESS.threshold, LOSSLESS.metric
        return Acceptance(threshold, metric, lenient and metric is Metric.PROBABILITY)

    @property
    def confidence_metric(self) -> Metric:
        """Metric used to measure confidence. It is the probability if no token is accepted on the basis of its
        confidence."""
        unused = self.mode is Mode.EXACT or (
            self.threshold is not None and accepts_nothing(self.threshold, self.metric)
        )
        return Metric.PROBABILITY if unused else self.metric


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """The part of one answer that an engine returned before it died. Another engine continues after it."""

    tokens: tuple[int, ...] = ()
    """Token ids of the answer so far."""
    forwards: int = 0
    """Number of forwards that produced these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt to continue, and how to decode it."""

    id: str
    prompt: tuple[int, ...]
    """Token ids."""
    tenant: str = ""
    """Owner of the request; cached prefixes are shared only between requests of the same owner."""
    service_class: str = STANDARD
    """Name of one of the engine's classes of service."""
    session: str = ""
    """Key of the requests that begin like this one, such as the turns of a conversation. A router sends them to the
    same engine, which has their beginning in its cache."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    decode: DecodeParams = field(default_factory=DecodeParams)
    partial_answers: Mapping[int, PartialAnswer] = field(default_factory=dict)
    """Answers to continue, by their index among the n answers. Answers without an entry have ended. An empty mapping
    requests all n answers from their first token."""
    trace_id: str = ""
    """Trace id of the request, for exemplars of metrics: 32 hexadecimal digits, or empty if it is not traced."""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, tuple):
            object.__setattr__(self, "prompt", token_ids("prompt", self.prompt))
        for name, kind in _KINDS.items():
            if not isinstance(value := getattr(self, name), kind):
                raise RequestError(f"{name} is {shortened(value)}; it must be a {kind.__name__}.")

    @property
    def indices(self) -> Sequence[int]:
        """Indices of the answers to decode."""
        return tuple(self.partial_answers) or range(self.sampling.n)


_KINDS: dict[str, type] = {
    **dict.fromkeys(("id", "tenant", "service_class", "session", "trace_id"), str),
    "sampling": SamplingParams,
    "decode": DecodeParams,
    "partial_answers": Mapping,
}
"""Types of the fields of a request, which are checked without pydantic, because requests are many."""


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Return the token ids in a list, an array or another sequence.

    Raises a `RequestError`, which names the argument, for other values.
    """
    items = items_of(value)
    if items is None or not all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
        raise RequestError(f"{name} is {shortened(value)}; it must be a list of token ids.")
    return tuple(map(int, items))


def _choice(name: str, value: object, kind: type[EnumT]) -> EnumT:
    if not isinstance(value, str) or value not in list(kind):
        raise RequestError(f"{name} is {shortened(value)}; choose one of {', '.join(kind)}.")
    return kind(value)


def _check_int(name: str, value: object, low: int, high: int | None = None, *, param: str | None = None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):  # type: ignore[operator]
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} is {shortened(value)}; it must be a whole number, {limits}.", param=param or name)


def _check_number(
    name: str, value: object, low: float, high: float, *, above: bool = False, param: str | None = None
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        start = "above" if above else "from"
        message = f"{name} is {shortened(value)}; it must be a number {start} {low} to {high}."
        raise RequestError(message, param=param or name)


def _stops(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else items_of(value)
    if stops is None or not all(isinstance(stop, str) for stop in stops):
        raise RequestError(f"stop is {shortened(value)}; it must be a text or a list of texts.")
    if len(stops) > STOP_STRINGS_MAX:
        raise RequestError(f"there are {len(stops)} stop strings; at most {STOP_STRINGS_MAX} are allowed.")
    for stop in stops:
        if not 1 <= len(stop) <= STOP_CHARACTERS_MAX:
            raise RequestError(
                f"a stop string has {len(stop)} characters; it must have from 1 to {STOP_CHARACTERS_MAX}."
            )
    return tuple(stops)


def seed_of(name: str) -> int:
    """Return a seed below 2**63 that depends on `name` only."""
    return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()) >> 1


def check_adapter(name: str | None, known: Collection[str]) -> None:
    """Raise a `RequestError` if `name` is neither None nor among the `known` names of an engine's adapters."""
    if name is not None and (not isinstance(name, str) or name not in known):
        raise RequestError(
            f"adapter is {shortened(name)}; this engine has {', '.join(known) or 'no adapters with a name'}."
        )
