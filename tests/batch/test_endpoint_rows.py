"""How long a stage tries an endpoint that refuses its rows for now."""

import asyncio
import time
from typing import Any

from openai.types.chat.chat_completion import ChatCompletion

from mars_ray.batch.ray.endpoint_rows import PATIENCE_S, EndpointRows, _RefusedForNow
from mars_ray.batch.run.endpoint_config import EndpointProcessorConfig


def test_a_refusal_after_a_pause_of_the_pipeline_is_tried_again() -> None:
    rows = EndpointRows(EndpointProcessorConfig(url="http://127.0.0.1:8000/v1"))
    rows._answered_s = time.monotonic() - 2 * PATIENCE_S  # the last block was answered long ago
    answer = ChatCompletion(id="a", choices=[], created=0, model="m", object="chat.completion")
    refusals = [_RefusedForNow("busy", after_s=0)]

    async def complete(**_: Any) -> ChatCompletion:
        if refusals:
            raise refusals.pop()
        return answer

    assert asyncio.run(rows._answer(complete, {})) is answer
