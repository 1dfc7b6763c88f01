"""The spans of a sequence: queue, read and decode."""

from collections.abc import Mapping

from opentelemetry.trace import Span, Status, StatusCode

from mars_ray.traces.engine_call import EndedSequence
from mars_ray.traces.tracer import Attribute, Tracer, nanoseconds

MAX_SEQUENCES = 16
"""Maximum number of sequences of a request that have spans, because a request may have a hundred."""


def add_sequence_spans(tracer: Tracer, parent: Span, sequence: EndedSequence, *, prompt: int = 0) -> None:
    """Add the spans of a sequence that has ended. `prompt` is the index of its prompt in the request."""
    decode_unix_s = sequence.ended_unix_s - sequence.decode_s
    read_unix_s = decode_unix_s - sequence.prefill_s

    def add(name: str, start_unix_s: float, end_unix_s: float, attributes: Mapping[str, Attribute]) -> None:
        named = {"mars_ray.prompt": prompt, "mars_ray.sequence": sequence.index}
        span = tracer.start(name, start_unix_s, parent=parent, attributes={**named, **attributes})
        if name == "decode" and sequence.reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        span.end(nanoseconds(end_unix_s))

    add("queue", read_unix_s - sequence.queued_s, read_unix_s, {})
    add(
        "read",
        read_unix_s,
        decode_unix_s,
        {
            "gen_ai.usage.input_tokens": sequence.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": sequence.cached_tokens,
        },
    )
    add(
        "decode",
        decode_unix_s,
        sequence.ended_unix_s,
        {
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
