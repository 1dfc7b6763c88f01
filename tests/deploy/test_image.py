"""The Dockerfile's own steps make something that serves, in a Debian in which there was nothing before."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mars_ray import LLM, SamplingParams
from tests.deploy.image_root import OWN, Image, machine_pip, network_of

CONTEXT = Path(__file__).parents[2]
PROGRAMS = ("mmdebstrap", "unshare", "nsenter", "chroot", "ip")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

QUESTION = "JSON with the keys name, age, city: Oscar, 34, lives in Dallas."
CLIENT = """
import sys
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key=sys.argv[1], max_retries=0)
message = {"role": "user", "content": sys.argv[2]}
answer = client.chat.completions.create(model="bundled", messages=[message], temperature=0, max_tokens=64)
print(answer.choices[0].message.content)
"""


def reason_to_skip() -> str:
    missing = [each for each in PROGRAMS if shutil.which(each) is None]
    return f"needs {', '.join(missing)}" if missing else "" if os.geteuid() == 0 else "needs root"


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    environment, paths = machine_pip()
    arguments = {}
    pypi = environment.get("PIP_INDEX_URL", "https://pypi.org/simple")
    if request.param == "cuda":  # of PyPI, not of the folder that this machine may have
        arguments["TORCH_INDEX_URL"], environment["PIP_FIND_LINKS"] = pypi, ""
    elif "PIP_FIND_LINKS" in environment:  # which may be all there is, where torch's own index cannot be reached
        arguments["TORCH_INDEX_URL"] = pypi
    root = tmp_path_factory.mktemp("image") / "root"
    image = Image(root, CONTEXT, arguments, environment, paths)
    try:
        image.build()
        yield image
    finally:
        shutil.rmtree(root)


def answer_here() -> str:
    [answer] = LLM("bundled").chat([QUESTION], SamplingParams(temperature=0, max_tokens=64))
    return answer.outputs[0].text


def ask(server: "subprocess.Popen[str]", key: str) -> "subprocess.CompletedProcess[str]":
    """Ask the endpoint with OpenAI's client, which is not in the image."""
    command = [*network_of(server), sys.executable, "-c", CLIENT, key, QUESTION]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def wait_until_healthy(image: Image, server: "subprocess.Popen[str]") -> None:
    """Check health again and again, as Docker does; the test's own limit ends it."""
    while not is_healthy(image, server):
        assert server.poll() is None
        time.sleep(1)


def is_healthy(image: Image, server: "subprocess.Popen[str]") -> bool:
    with image.start(image.health_check, network_of(server), stderr=subprocess.DEVNULL) as check:
        return check.wait() == 0


def test_without_keys_the_image_says_what_it_wants(image: Image) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        image.run(image.command)
    assert refused.value.returncode == 2
    assert "/etc/mars-ray/keys.yaml" in refused.value.stderr


def test_the_image_serves_callers_with_a_key_as_a_user_without_rights(image: Image) -> None:
    [key] = image.run(["mars-ray", "keys", "add", "--file", "/etc/mars-ray/keys.yaml", "--name", "ann"]).split()
    with image.start([*image.entrypoint, *image.command], OWN, stdout=subprocess.DEVNULL) as server:
        try:
            assert not is_healthy(image, server)
            wait_until_healthy(image, server)
            answered, refused = ask(server, key), ask(server, "another")
            assert answered.stdout.strip() == answer_here(), answered.stderr
            assert "401" in refused.stderr
            [first] = psutil.Process(server.pid).children()
            assert {each.uids().effective for each in [first, *first.children(recursive=True)]} == {1000}
            first.send_signal(signal.SIGTERM)
            assert server.wait() == 0
        finally:
            server.kill()
