"""A request to the engine: a prompt, how to choose tokens, how far to look ahead, when to stop.

Every value of a request is in range; what depends on the model is checked by `core/limits`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import repr as shortened

from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.mode import Mode
from mars_ray.engine.service_class import STANDARD
from mars_ray.errors import RequestError
from mars_ray.method.metric import Metric, accepts_nothing

STOP_STRINGS_MAX = 16
STOP_CHARACTERS_MAX = 256
TOP_LOGPROBS_MAX = 20
N_MAX = 64
NATS_MAX = 1e6
"""Largest threshold on the entropy, far above the entropy of any vocabulary: it accepts everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How each token is chosen and when a sequence ends. Raises `RequestError` for values out of range."""

    max_tokens: int = 256
    """Tokens generated at most; fewer where the context of the model ends."""
    min_tokens: int = 0
    """No stop token is chosen, and no stop string looked for, before so many tokens. A grammar that allows nothing more
    ends the sequence all the same."""
    temperature: float = 0.0
    """At 0 the most likely token is taken."""
    top_p: float = 1.0
    """The draw is among the most likely tokens that together have this probability."""
    top_k: int = 0
    """The draw is among so many of the most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Tokens less likely than this share of the most likely one are left out."""
    seed: int | None = None
    """The same seed gives the same draws; without one the engine picks one."""
    n: int = 1
    """Sequences generated for the prompt; the k-th draws as a request with seed + k would."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these; the tokens end with the one that completed it."""
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end the sequence besides the model's own; the id is its last token and adds no text."""
    ignore_eos: bool = False
    """The model's own stop tokens do not end the sequence."""
    logprobs: int | None = None
    """Log-probabilities of the chosen token and so many of the most likely ones; None for none at all."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Numbers added to the logits of tokens, by token id."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token generated before."""
    frequency_penalty: float = 0.0
    """Subtracted for each time a token was generated before."""
    repetition_penalty: float = 1.0
    """Divides the positive, multiplies the negative logits of tokens in prompt or output (arXiv 1909.05858)."""
    grammar: GrammarSpec | None = None
    """The grammar the text must follow; an answer cut short by `max_tokens` or a stop string is only its beginning."""

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_number("temperature", self.temperature, 0, 100)
        _check_number("top_p", self.top_p, 0, 1, above=True)
        _check_int("top_k", self.top_k, 0)
        _check_number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1)
        _check_int("n", self.n, 1, N_MAX)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, TOP_LOGPROBS_MAX)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {shortened(self.ignore_eos)}; it must be true or false.")
        _check_stops(self.stop)
        if not isinstance(self.stop_ids, frozenset):
            raise RequestError(f"stop_ids is {type(self.stop_ids).__name__}; it must be a frozenset of token ids.")
        for number in self.stop_ids:
            _check_int("a stop id", number, 0)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias is {shortened(self.logit_bias)}; it must map token ids to numbers.")
        for token, bias in self.logit_bias.items():
            _check_int("a token of logit_bias", token, 0)
            _check_number(f"logit_bias of token {token}", bias, -100, 100)
        if self.grammar is not None and not isinstance(self.grammar, GrammarSpec):
            raise RequestError(f"grammar is {type(self.grammar).__name__}; it must be a GrammarSpec.")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What the tokens at the masks of one forward need to be accepted."""

    threshold: float
    metric: Metric
    verify: bool
    """Whether the tokens are drafts that the next forward has to agree with before they leave the engine."""

    @property
    def quality(self) -> float:
        """The threshold that answers are reported with: 1 where they are those of one token at a time."""
        return 1.0 if self.verify else self.threshold


LOSSLESS = Acceptance(0.0, Metric.PROBABILITY, verify=True)
"""Exact mode, and a threshold of 1: every token ahead is a draft that is verified. How many are worth that is told by
what they cost, for no draft can harm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParams:
    """How far to look ahead. Raises `RequestError` for values out of range."""

    mode: Mode = Mode.THRESHOLD
    threshold: float | None = None
    """0..1 for probability and margin, nats for entropy. Where nothing could pass it (1, or 0 nats), tokens ahead are
    verified as in exact mode, so the answer is that of one token at a time. In modes ar and exact it has no meaning.
    None follows the engine's own threshold, which may change between steps."""
    floor: float | None = None
    """A request without a threshold of its own follows the engine's, but not below this."""
    metric: Metric = Metric.PROBABILITY
    block: int | None = None
    """Tokens proposed per forward: the autoregressive one and block - 1 masks. None lets the engine choose for
    each step what the batch pays for, up to the block the model was trained with."""
    adapter: str | None = None
    """The adapter that decodes the masks, by its name in the engine; None takes the engine's unnamed one, if it has
    one, else the model itself. In mode ar, and where tokens are verified, answers are the same with any."""

    def __post_init__(self) -> None:
        if not isinstance(self.mode, Mode):
            raise RequestError(f"mode is {shortened(self.mode)}; choose one of {', '.join(Mode)}.")
        if not isinstance(self.metric, Metric):
            raise RequestError(f"metric is {shortened(self.metric)}; choose one of {', '.join(Metric)}.")
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

    def acceptance(self, engine_threshold: float) -> Acceptance | None:
        """Return what tokens at masks need, where the engine's own threshold is `engine_threshold`.

        None where no mask is worth feeding.
        """
        if self.mode is Mode.AR:
            return None
        threshold = max(engine_threshold, self.floor or 0.0) if self.threshold is None else self.threshold
        if self.mode is Mode.EXACT or accepts_nothing(threshold, self.metric):
            return LOSSLESS
        return Acceptance(threshold, self.metric, verify=False)

    @property
    def confidence_metric(self) -> Metric:
        """What confidences are measured by: for drafts, which need none, their probability of being right."""
        unused = self.mode is Mode.EXACT or (
            self.threshold is not None and accepts_nothing(self.threshold, self.metric)
        )
        return Metric.PROBABILITY if unused else self.metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue."""

    id: str
    prompt: tuple[int, ...]
    """Token ids."""
    tenant: str = ""
    """Prefixes that lie in the cache are shared within a tenant only."""
    service_class: str = STANDARD
    """The class of service; the engine says which there are."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    decode: DecodeParams = field(default_factory=DecodeParams)


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):  # type: ignore[operator]
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} is {shortened(value)}; it must be a whole number, {limits}.")


def _check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        start = "above" if above else "from"
        raise RequestError(f"{name} is {shortened(value)}; it must be a number {start} {low} to {high}.")


def _check_stops(stops: object) -> None:
    if not isinstance(stops, tuple) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError(f"stop is {shortened(stops)}; it must be a tuple of strings.")
    if len(stops) > STOP_STRINGS_MAX:
        raise RequestError(f"there are {len(stops)} stop strings; at most {STOP_STRINGS_MAX} are allowed.")
    for stop in stops:
        if not 1 <= len(stop) <= STOP_CHARACTERS_MAX:
            raise RequestError(
                f"a stop string has {len(stop)} characters; it must have from 1 to {STOP_CHARACTERS_MAX}."
            )
