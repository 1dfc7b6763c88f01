"""The sequences of a request, and the thresholds of service classes that apply to sequences."""

from collections import abc

from mars_ray.engine.core.limits import EngineLimits
from mars_ray.engine.grammar.matcher import Grammars, ModelTokens
from mars_ray.engine.request import Acceptance, PartialAnswer, Request
from mars_ray.engine.scheduling.detokenizer import IncrementalDetokenizer
from mars_ray.engine.scheduling.sequence import FORCED_DRAFTS, Drafts, Sequence
from mars_ray.errors import ConfigError, RequestError


class ClassThresholds:
    """Threshold of each class of service, for requests that do not set one."""

    def __init__(self, by_class: abc.Mapping[str, float]) -> None:
        self.by_class: dict[str, float] = dict(by_class)
        self.changes = 0
        """Number of times the threshold of a class changed."""
        self.set(by_class)

    def set(self, by_class: abc.Mapping[str, float]) -> None:
        """Set the thresholds of some classes.

        Raises `ConfigError` for an unknown class or a value out of range, in which case no threshold changes.
        """
        for name, value in by_class.items():
            if name not in self.by_class:
                raise ConfigError(f"there is no class {name!r}; there are {', '.join(self.by_class)}.")
            if not 0 <= value <= 1:
                raise ConfigError(f"threshold is {value}; it must be from 0 to 1.")
        self.changes += sum(value != self.by_class[name] for name, value in by_class.items())
        self.by_class |= by_class

    def acceptance(self, sequence: Sequence, *, lenient: bool) -> Acceptance | None:
        """Return the condition for keeping tokens in a sequence now; None if the sequence gets no masks."""
        return sequence.request.decode.acceptance(self.by_class[sequence.service_class], lenient=lenient)

    def check_class(self, request: Request) -> None:
        """Raise `RequestError` for a request of an unknown class."""
        if request.service_class not in self.by_class:
            raise RequestError(
                f"service_class is {request.service_class!r}; this engine has {', '.join(self.by_class)}."
            )


def new_sequences(
    request: Request,
    seed: int,
    model: ModelTokens,
    limits: EngineLimits,
    grammars: Grammars | None,
) -> list[Sequence]:
    """Return the sequences of a valid request. A partial answer counts as output, as after a preemption.

    Without `grammars`, the sequences have no matcher. Raises `GrammarError` for an unusable grammar.
    """
    sampling = request.sampling
    max_tokens = min(sampling.max_tokens, limits.max_model_len - len(request.prompt))
    stop_ids = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else model.stop_ids)
    scored = sampling.prompt_logprobs is not None
    sequences = []
    for index in request.indices:
        partial = request.partial_answers.get(index, PartialAnswer())
        matcher = grammars.matcher(sampling.grammar, stop_ids) if grammars and sampling.grammar else None
        if matcher is not None:
            matcher.seek(list(partial.tokens))
            matcher.settle()
        detokenizer = IncrementalDetokenizer(model.tokenizer, sampling.stop, sampling.skip_special_tokens)
        for count, token in enumerate(partial.tokens, start=1):
            detokenizer.push(token, may_stop=count > sampling.min_tokens)
        sequence = Sequence(
            request=request,
            index=index,
            seed=(seed + index) % 2**64,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            detokenizer=detokenizer,
            tokens=[*request.prompt, *partial.tokens],
            matcher=matcher,
            prompt_logprobs=[] if scored and index == 0 and not partial.tokens else None,
            # Forced tokens are fed together with the prompt.
            drafts=Drafts.certain(
                matcher.take_forced(min(FORCED_DRAFTS, max_tokens - len(partial.tokens))) if matcher else []
            ),
            forwards=partial.forwards,
        )
        sequences.append(sequence)
    return sequences
