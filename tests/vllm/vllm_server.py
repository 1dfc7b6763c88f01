"""`vllm serve` with the bundled model in a process of its own, on Triton's interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is missing: run make test-vllm", allow_module_level=True)

import httpx2
from openai import OpenAI

from tests.store_server import free_port
from tests.vllm import INTERPRETER
from tests.vllm.interpreted import ASSETS, BUNDLED

FLAGS = {
    "--hf-overrides": '{"architectures": ["MarsQwen2ForCausalLM"]}',
    "--dtype": "float32",
    "--max-model-len": "512",
    "--max-num-seqs": "4",
}
PROMPT = json.loads((ASSETS / "prompts.jsonl").read_text().splitlines()[0])["prompt"]


def start(port: int, settings: dict[str, Any], *options: str) -> "subprocess.Popen[str]":
    """Start a server with these settings of MARS."""
    vllm = Path(sys.executable).parent / "vllm"
    flags = [word for flag in FLAGS.items() for word in flag]
    mars = json.dumps({"mars": settings})
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(INTERPRETER), os.environ.get("PYTHONPATH")])),
        "VLLM_SERVER_DEV_MODE": "1",  # its /collective_rpc reads our counts
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # the engine runs in a process of its own
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    command = [str(vllm), "serve", str(BUNDLED), *flags, "--additional-config", mars, "--enforce-eager"]
    return subprocess.Popen(
        [*command, "--port", str(port), *options],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@contextmanager
def serving(settings: dict[str, Any], *options: str) -> Iterator[str]:
    """Yield the URL of a server."""
    port = free_port()
    with start(port, settings, *options) as server:
        assert server.stdout is not None
        try:
            log = []
            for line in server.stdout:
                log.append(line)
                if "Application startup complete" in line:
                    break
            else:
                pytest.fail("".join(log[-60:]))
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.communicate()


def answer(url: str, **xargs: Any) -> str:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    completion = client.chat.completions.create(
        model=str(BUNDLED),
        messages=[{"role": "user", "content": PROMPT}],
        temperature=0,
        max_tokens=48,
        extra_body={"vllm_xargs": xargs},
    )
    return completion.choices[0].message.content or ""


def rpc(url: str, method: str, *arguments: Any) -> Any:
    response = httpx2.post(f"{url}/collective_rpc", json={"method": method, "args": arguments}, timeout=60)
    return response.raise_for_status().json()["results"][0]


def tokens_per_forward(url: str, **xargs: Any) -> tuple[str, float]:
    before = rpc(url, "mars_record")["lookahead"]
    text = answer(url, **xargs)
    after = rpc(url, "mars_record")["lookahead"]
    return text, (after["tokens"] - before["tokens"]) / max(1, after["forwards"] - before["forwards"])
