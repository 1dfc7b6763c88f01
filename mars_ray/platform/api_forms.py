"""The forms of all APIs of an endpoint with a platform."""

from mars_ray.openai_api.responses_protocol import RESPONSES_PATH
from mars_ray.openai_api.responses_translate import responses_error
from mars_ray.platform.anthropic.api_form import ANTHROPIC, uses_messages_api
from mars_ray.serve.middleware.api_form import OPENAI, ApiForm

RESPONSES = ApiForm(translated=responses_error)


def api_of(path: str) -> ApiForm:
    """Return the form of the API that a path belongs to."""
    if uses_messages_api(path):
        return ANTHROPIC
    return RESPONSES if path == RESPONSES_PATH else OPENAI
