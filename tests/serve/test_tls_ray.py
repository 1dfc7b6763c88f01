"""`mars-ray serve` with a certificate, open to the network: who is answered, and what listens where."""

import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import yaml
from openai import DefaultHttpxClient, OpenAI

from mars_ray.ray_cluster import temporary_folder
from tests.samples import Cli
from tests.serve.certificates import Certificate, certificate
from tests.serve.cluster_samples import GATEWAY, STEP_SECONDS, Cluster, cluster, deploy_file
from tests.serve.endpoint_samples import MESSAGES
from tests.serve.key_samples import add_key

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Guarded:
    """An endpoint with a certificate and a key."""

    cluster: Cluster
    certificate: Certificate
    key: str

    @property
    def port(self) -> int:
        return int(self.cluster.url.rpartition(":")[2])


def with_certificate(path: Path, args: dict[str, object], made: Certificate) -> Path:
    fields = yaml.safe_load(deploy_file(path, args).read_text())
    tls = {"ssl_certfile": str(made.file), "ssl_keyfile": str(made.key)}
    path.write_text(yaml.safe_dump(fields | {"http_options": {"host": "0.0.0.0"} | tls}))
    return path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("tls")
    made, key = certificate(folder / "certificate"), add_key(folder / "keys.yaml", "ada", "use")
    config = with_certificate(folder / "serve.yaml", {"keys": str(folder / "keys.yaml")}, made)
    with cluster("--config", str(config)) as started:
        yield Guarded(started, made, key)


@pytest.mark.slow
def test_the_openai_client_and_curl_are_answered_over_tls(guarded: Guarded) -> None:
    url = f"https://localhost:{guarded.port}/v1"
    trusting = ssl.create_default_context(cafile=guarded.certificate.authority)
    with OpenAI(base_url=url, api_key=guarded.key, http_client=DefaultHttpxClient(verify=trusting)) as client:
        answer = client.chat.completions.create(model="bundled", messages=MESSAGES, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].finish_reason == "stop"
    trust, key = ("--cacert", str(guarded.certificate.authority)), ("--header", f"Authorization: Bearer {guarded.key}")
    asked = ["curl", "--silent", "--show-error", *trust, *key, f"{url}/models"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=STEP_SECONDS).stdout
    assert '"bundled"' in said


@pytest.mark.slow
def test_nobody_is_answered_in_the_clear(guarded: Guarded) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=STEP_SECONDS) as clear:
        key = f"authorization: Bearer {guarded.key}"
        clear.sendall(f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n{key}\r\n\r\n".encode())
        with suppress(OSError):
            assert b"HTTP" not in clear.recv(1000)


@pytest.mark.slow
def test_gateways_listen_for_the_load_balancer_alone(guarded: Guarded) -> None:
    (gateway,) = guarded.cluster.processes(GATEWAY)
    addresses = {each.laddr.port: each.laddr.ip for each in gateway.net_connections() if each.status == "LISTEN"}
    (own,) = {address for address in addresses.items() if 30_000 <= address[0] <= 31_000}
    assert own[1] == "127.0.0.1"


@pytest.mark.slow
def test_what_ray_keeps_is_for_its_owner_alone(guarded: Guarded) -> None:
    token = Path.home() / ".ray" / "auth_token"
    assert (temporary_folder().stat().st_mode & 0o777, token.stat().st_mode & 0o777) == (0o700, 0o600)
    sockets = [each.laddr for each in psutil.net_connections("unix") if "/plasma_store" in each.laddr]
    assert any(path.startswith(f"{temporary_folder()}/ray/") for path in sockets)


def test_a_certificate_that_is_of_no_use_is_said_before_anything_starts(mars_ray: Cli, tmp_path: Path) -> None:
    past = certificate(tmp_path / "past", days=-1)
    add_key(tmp_path / "keys.yaml", "ada", "use")
    config = with_certificate(tmp_path / "serve.yaml", {"keys": str(tmp_path / "keys.yaml")}, past)
    with patch.dict(os.environ):  # the command sets variables of Ray
        code, _, said = mars_ray("serve", "--config", config)
    assert code == 2
    assert "certificate has expired" in said and "Traceback" not in said
