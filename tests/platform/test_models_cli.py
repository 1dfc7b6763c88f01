"""`mars-ray models`: a command or an option that has moved answers with its new place."""

import pytest
from typer.testing import CliRunner

from mars_ray.platform.cli.models import models_app


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("promote smol --url http://127.0.0.1:8000", "a canary is a second application of Ray Serve"),
        ("take-back smol", "a canary is a second application of Ray Serve"),
        ("add smol smollm2 --share 0.1", "a canary is a second application of Ray Serve"),
        ("add smol smollm2 --samples 200", "a canary is a second application of Ray Serve"),
        ("add smol smollm2 --tolerance 0.02", "a canary is a second application of Ray Serve"),
        ("add smol smollm2 --sleep-after 10m", "set `min_replicas: 0` in --config"),
    ],
)
def test_what_has_moved_says_where_to_in_one_line(words: str, place: str) -> None:
    done = CliRunner().invoke(models_app, words.split())
    message = str(done.exception)
    assert "has moved" in message and f"{place}; see docs/models.md." in message and "\n" not in message
