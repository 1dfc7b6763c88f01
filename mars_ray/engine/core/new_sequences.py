"""The sequences of a new request, with what the model and the engine decide about them."""

from mars_ray.engine.core.limits import EngineLimits
from mars_ray.engine.grammar.matcher import Grammars
from mars_ray.engine.request import Request
from mars_ray.engine.scheduling.detokenizer import IncrementalDetokenizer
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.model.checkpoint import Checkpoint


def new_sequences(
    request: Request, seed: int, checkpoint: Checkpoint, limits: EngineLimits, grammars: Grammars
) -> list[Sequence]:
    """Return the n sequences of a request that was checked against the limits.

    Raises `RequestError` for a grammar that cannot be used.
    """
    sampling = request.sampling
    max_tokens = min(sampling.max_tokens, limits.max_model_len - len(request.prompt))
    stop_ids = sampling.stop_ids | (frozenset() if sampling.ignore_eos else checkpoint.stop_ids)
    matchers = [
        None if sampling.grammar is None else grammars.matcher(sampling.grammar, stop_ids) for _ in range(sampling.n)
    ]
    return [
        Sequence(
            request=request,
            index=index,
            seed=(seed + index) % 2**64,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            detokenizer=IncrementalDetokenizer(checkpoint.tokenizer, sampling.stop),
            tokens=list(request.prompt),
            matcher=matcher,
            draft_tokens=matcher.take_forced(max_tokens) if matcher else [],  # read with the prompt
        )
        for index, matcher in enumerate(matchers)
    ]
