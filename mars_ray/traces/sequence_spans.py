"""The spans of a sequence: queue, read and decode."""

from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode

from mars_ray.traces.engine_call import EndedSequence
from mars_ray.traces.tracer import Tracer, nanoseconds

MAX_SEQUENCES = 16
"""Maximum number of sequences of a request that have spans, because a request may have a hundred."""


def add_sequence_spans(tracer: Tracer, parent: Context, sequence: EndedSequence, *, prompt: int = 0) -> None:
    """Add the spans of a sequence that has ended. `prompt` is the index of its prompt in the request."""
    decode_unix_s = sequence.ended_unix_s - sequence.decode_s
    read_unix_s = decode_unix_s - sequence.prefill_s
    attributes = {"mars_ray.prompt": prompt, "mars_ray.sequence": sequence.index}
    queue = tracer.start("queue", read_unix_s - sequence.queued_s, parent=parent, attributes=attributes)
    queue.end(nanoseconds(read_unix_s))
    read = tracer.start(
        "read",
        read_unix_s,
        parent=parent,
        attributes={
            **attributes,
            "gen_ai.usage.input_tokens": sequence.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": sequence.cached_tokens,
        },
    )
    read.end(nanoseconds(decode_unix_s))
    decode = tracer.start(
        "decode",
        decode_unix_s,
        parent=parent,
        attributes={
            **attributes,
            "gen_ai.usage.output_tokens": sequence.tokens,
            "gen_ai.response.finish_reasons": (sequence.reason,),
            "mars_ray.steps": sequence.forwards,
            "mars_ray.tokens_per_forward": sequence.tokens / max(1, sequence.forwards),
            "mars_ray.threshold.low": sequence.threshold_low,
            "mars_ray.threshold.high": sequence.threshold_high,
            "mars_ray.mode": sequence.mode,
            "mars_ray.block": sequence.block,
        },
    )
    if sequence.reason == "error":
        decode.set_status(Status(StatusCode.ERROR))
    decode.end(nanoseconds(sequence.ended_unix_s))
