"""Answer prompts with the engine in each of several ways of decoding, greedily.

How far is looked ahead is fixed, so the answers are the same whatever the load and the order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mars_ray.adapter.card import unnamed
from mars_ray.adapter.folder import Adapter
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import OfflineResult, decode_all
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import BadRecordError, DataError, RequestError
from mars_ray.evaluation.calibration.prompts import CalibrationPrompt
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.progress import ProgressLine


def answer_prompts(
    checkpoint: Checkpoint,
    prompts: Sequence[CalibrationPrompt],
    decodes: Sequence[DecodeParams],
    sampling: SamplingParams,
    progress: ProgressLine,
    adapter: Adapter | None = None,
) -> list[list[OfflineResult]]:
    """Answer every prompt in every way of decoding; where one does not say how far to look, the card does.

    Raises `DataError` for a prompt the chat template refuses, or the model has no room for, before any is answered.
    """
    options = EngineOptions(compiled=False, max_request_tokens=sampling.max_tokens)
    engine = Engine(checkpoint, options, adapters=unnamed(adapter))
    encoder = ChatEncoder(checkpoint.tokenizer)
    decodes = [replace(decode, block=decode.block or engine.block) for decode in decodes]
    encoded = [_encoded(prompt, encoder, engine, sampling) for prompt in prompts]
    found: dict[str, OfflineResult] = {}
    for decoded in decode_all(engine, _requests(encoded, sampling, decodes)):
        found[decoded.request.id] = decoded
        progress.update(len(found), {})
    return [[found[f"{number}/{rank}"] for rank in range(len(decodes))] for number in range(len(prompts))]


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
    """All ways of a prompt together: they share it in the cache."""
    for number, prompt in enumerate(prompts):
        for rank, decode in enumerate(decodes):
            yield Request(id=f"{number}/{rank}", prompt=prompt, sampling=sampling, decode=decode)
