"""The endpoints for clients, in a process whose environment need not be that of the clients."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Clients find no key of somebody's account, and send nothing to anybody else.
os.environ |= {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"}


@pytest.fixture(scope="session")
def urls() -> Iterator[dict[str, str]]:
    """URLs by the name of the model: `bundled` knows the tasks of its card, `scripted` calls tools by a script."""
    if "SERVER_PYTHON" not in os.environ:
        pytest.skip("clients run in environments of their own: run make test-clients")
    command = [os.environ["SERVER_PYTHON"], "-m", "tests.clients.endpoint"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin and server.stdout
        line = server.stdout.readline()
        assert line, "the endpoints start"
        yield json.loads(line)
        server.stdin.close()
    assert server.returncode == 0


@pytest.fixture(scope="session")
def bundled(urls: dict[str, str]) -> str:
    return urls["bundled"]


@pytest.fixture(scope="session")
def scripted(urls: dict[str, str]) -> str:
    return urls["scripted"]
