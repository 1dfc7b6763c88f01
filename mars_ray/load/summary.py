"""What the records of a load say together: counts, rates, and how latencies are spread.

A request that was not completed counts, and has no latency. Percentiles are interpolated between samples; the standard
deviation is that of the samples themselves (ddof 0).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mars_ray.load.record import RequestOutcome, RequestRecord
from mars_ray.load.slo import RequestSlo
from mars_ray.measure import Spread, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How the samples of one latency are spread."""

    samples: int
    mean: float
    median: float
    p90: float
    p99: float
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Latencies of completed requests in milliseconds; None where nothing was measured."""

    ttft: Distribution | None
    """Time to the first token: first chunk - sent."""
    ttft_arrival: Distribution | None
    """First chunk - scheduled arrival; None in a closed loop."""
    tpot: Distribution | None
    """Time per output token: (E2E - TTFT) / (tokens - 1)."""
    chunk_gap: Distribution | None
    """Times from chunk to chunk, over all requests; a chunk may hold several tokens."""
    e2e: Distribution | None
    """End - sent, in an open loop end - scheduled arrival."""
    delay: Distribution | None
    """Delay of sending: sent - scheduled arrival; None in a closed loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests completed within all limits."""

    requests_per_s: float
    fraction: float
    """Share of all requests that were not interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A load as a whole."""

    duration_s: float
    """Seconds from the beginning of the load to its last end."""
    requests: dict[str, int]
    """Requests by outcome."""
    errors: dict[str, str]
    """What the first request of each other outcome than ok said."""
    waited: int
    """Requests that found all clients busy at their arrival."""
    requests_per_s: float
    """Completed requests per second."""
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    without_usage: int
    """Completed requests whose tokens the server did not count."""
    tokens_per_forward: float | None
    """Tokens of all answers that say it, by all their forwards."""
    retry_after_s: Spread | None
    latency_ms: Latencies
    goodput: Goodput | None
    """Requests that met the SLO; None when none was given."""


def summarize(records: Sequence[RequestRecord], slo: RequestSlo | None) -> Summary:
    """Return what `records` say, of which there may be none."""
    done = [record for record in records if record.outcome is RequestOutcome.OK]
    duration_s = max((record.end_s for record in records), default=0.0)
    output_tokens = sum(record.completion_tokens or 0 for record in done)
    retries_s = [record.retry_after_s for record in records if record.retry_after_s is not None]
    counts = Counter(record.outcome for record in records)
    return Summary(
        duration_s=duration_s,
        requests={outcome.value: counts[outcome] for outcome in RequestOutcome if counts[outcome]},
        errors={record.outcome.value: record.error for record in reversed(records) if record.error},
        waited=sum(record.waited for record in records),
        requests_per_s=_rate(len(done), duration_s),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in done),
        output_tokens=output_tokens,
        output_tokens_per_s=_rate(output_tokens, duration_s),
        without_usage=sum(record.completion_tokens is None for record in done),
        tokens_per_forward=_tokens_per_forward(done),
        retry_after_s=spread(retries_s) if retries_s else None,
        latency_ms=latencies(done),
        goodput=None if slo is None else goodput(records, slo, duration_s),
    )


def goodput(records: Iterable[RequestRecord], slo: RequestSlo, duration_s: float) -> Goodput:
    """Return how many requests kept all limits."""
    ended = [record for record in records if record.outcome is not RequestOutcome.INTERRUPTED]
    good = sum(slo.met_by(record) for record in ended)
    return Goodput(requests_per_s=_rate(good, duration_s), fraction=good / len(ended) if ended else 0.0)


def latencies(done: Sequence[RequestRecord]) -> Latencies:
    """Return how the latencies of completed requests are spread."""
    arrived = [record for record in done if record.scheduled_s is not None]
    return Latencies(
        ttft=distribution_ms(record.ttft_s for record in done),
        ttft_arrival=distribution_ms(record.ttft_asked_s for record in arrived),
        tpot=distribution_ms(record.tpot_s for record in done),
        chunk_gap=distribution_ms(gap for record in done for gap in record.chunk_gaps_s),
        e2e=distribution_ms(record.e2e_s for record in done),
        delay=distribution_ms(record.delay_s for record in arrived),
    )


def distribution_ms(seconds: Iterable[float | None]) -> Distribution | None:
    """Return the spread in milliseconds of those that were measured, None when there are none."""
    measured_ms = [1000 * value for value in seconds if value is not None]
    if not measured_ms:
        return None
    median, p90, p99 = np.percentile(measured_ms, [50, 90, 99]).tolist()
    mean, std = float(np.mean(measured_ms)), float(np.std(measured_ms))
    return Distribution(samples=len(measured_ms), mean=mean, median=median, p90=p90, p99=p99, std=std)


def _tokens_per_forward(done: Iterable[RequestRecord]) -> float | None:
    known = [(each.completion_tokens, each.tokens_per_forward) for each in done]
    pairs = [(tokens, rate) for tokens, rate in known if tokens and rate]
    return sum(tokens for tokens, _ in pairs) / sum(tokens / rate for tokens, rate in pairs) if pairs else None


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
