"""Compare the answers of two versions of a model, in the gateway that serves them.

In:    the answers of both versions as tokens.
Out:   for some answers, the share of tokens that the present version would have chosen; counts of answers and failures.
Never: delays an answer, or compares more than one at a time.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from uuid import uuid4

from mars_ray.engine.chunk import TokenLogprobs
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import MarsRayError
from mars_ray.platform.models.canary import CanaryReport
from mars_ray.serve.http.endpoint import Endpoint

log = logging.getLogger(__name__)


class CanaryObserver:
    """Observes the endpoints of the present and of the new version, each given with its number, until `close`."""

    def __init__(self, present: tuple[int, Endpoint], new: tuple[int, Endpoint]) -> None:
        self._present = present[1]
        self._versions = {number: _Seen(number) for number, _ in (present, new)}
        self._comparing: asyncio.Task[None] | None = None
        for number, endpoint in (present, new):
            endpoint.calls.observer = _Observer(self, number)
        self._endpoints = (present[1], new[1])

    def close(self) -> None:
        """Stop observing."""
        for endpoint in self._endpoints:
            endpoint.calls.observer = None
        if self._comparing:
            self._comparing.cancel()

    def take_reports(self) -> list[CanaryReport]:
        """Return what was seen since the last call."""
        reports = [seen.report() for seen in self._versions.values()]
        return [report for report in reports if report.answers or report.failures or report.agreements]

    def answered(self, number: int, request: Request, tokens: Sequence[int]) -> None:
        """Count an answer, and compare it unless a comparison runs or the other version has fewer."""
        seen = self._versions[number]
        seen.answers += 1
        behind = seen.compared <= min(version.compared for version in self._versions.values())
        if tokens and behind and (self._comparing is None or self._comparing.done()):
            seen.compared += 1
            self._comparing = asyncio.create_task(self._compare(seen, request, tokens))

    def failed(self, number: int) -> None:
        """Count a request that a version could not answer."""
        self._versions[number].failures += 1

    async def _compare(self, seen: "_Seen", request: Request, tokens: Sequence[int]) -> None:
        scoring = Request(
            id=uuid4().hex,
            prompt=(*request.prompt, *tokens),
            tenant=request.tenant,
            service_class=self._present.batch_class or request.service_class,
            sampling=SamplingParams(max_tokens=0, prompt_logprobs=1),
            decode=DecodeParams(mode=Mode.AR),
        )
        scores: list[TokenLogprobs] = []
        try:
            async with aclosing(self._present.client.stream(scoring)) as chunks:
                async for chunk in chunks:
                    scores += chunk.prompt_logprobs
        except MarsRayError as error:  # such as a full queue, or an answer that fills the whole context
            log.debug("an answer was not compared: %s", error)
        answer = scores[-len(tokens) :]
        if len(answer) == len(tokens):
            agreed = sum(score.top[0][0] == token for score, token in zip(answer, tokens, strict=True))
            seen.agreements.append(agreed / len(tokens))


class _Seen:
    """What was seen of one version since the last report."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.compared = 0
        self.answers = 0
        self.failures = 0
        self.agreements: list[float] = []

    def report(self) -> CanaryReport:
        report = CanaryReport(
            number=self.number, answers=self.answers, failures=self.failures, agreements=tuple(self.agreements)
        )
        self.answers = self.failures = 0
        self.agreements = []
        return report


class _Observer:
    """Passes the answers of one version on."""

    def __init__(self, canary: CanaryObserver, number: int) -> None:
        self._canary = canary
        self._number = number

    def answered(self, request: Request, tokens: Sequence[int]) -> None:
        self._canary.answered(self._number, request, tokens)

    def failed(self) -> None:
        self._canary.failed(self._number)
