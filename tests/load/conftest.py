"""A small OpenAI-compatible server to put load on."""

from collections.abc import Iterator

import pytest

from tests.load.server_samples import SmallServer, serving


@pytest.fixture
def server() -> SmallServer:
    return SmallServer()


@pytest.fixture
def url(server: SmallServer) -> Iterator[str]:
    with serving(server) as address:
        yield address
