"""The least that each route takes."""

from typing import Any

from mars_ray.installed import HAS_PLATFORM
from tests.serve.endpoint_clients import MODEL
from tests.serve.endpoint_samples import MESSAGES

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES_PATH, RESPONSES = "/v1/messages", "/v1/responses"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": MESSAGES, "max_tokens": 1},
    COMPLETIONS: {"model": MODEL, "prompt": "Hello", "max_tokens": 1},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5]},
}
if HAS_PLATFORM:
    LEAST |= {
        MESSAGES_PATH: {"model": MODEL, "messages": MESSAGES, "max_tokens": 1},
        f"{MESSAGES_PATH}/count_tokens": {"model": MODEL, "messages": MESSAGES},
        RESPONSES: {"model": MODEL, "input": "Hello", "max_output_tokens": 1},
    }
