"""Settings of a machine's load balancer: its address, its certificate and its connections per client.

In:    the environment of Ray on that machine. `mars-ray serve` sets it for a cluster that it starts; on your own
       cluster, you set it.
Out:   the `bind` line of HAProxy's configuration, and the lines that limit connections per client.
Never: passes the host or the certificate on to the gateways: HAProxy speaks plain HTTP to them, and gateways on the
       same machine listen on the loopback interface.
"""

import os
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mars_ray.errors import ConfigError

HOST = "MARS_RAY_HTTP_HOST"
"""Environment variable with the address on which HAProxy listens, if it differs from the gateways' address."""
CERTIFICATE = "MARS_RAY_TLS_CERTFILE"
KEY = "MARS_RAY_TLS_KEYFILE"
CONNECTIONS = "MARS_RAY_CONNECTIONS_PER_SOURCE"
"""Environment variable with the maximum number of connections per client address; unlimited if not set."""
BEHIND = "127.0.0.1"
"""Address on which gateways listen if the load balancer runs on the same machine."""
TLS = "alpn http/1.1 ssl-min-ver TLSv1.2"
"""TLS options of the `bind` line. They exclude HTTP/2 because the limits on sizes and times assume connections that
carry one request at a time."""
UNACKNOWLEDGED_SECONDS = 30


def set_front(http_options: Mapping[str, Any]) -> None:
    """Write the load balancer settings of `http_options` into the environment of this process."""
    os.environ[HOST] = str(http_options["host"])
    for name, field in ((CERTIFICATE, "ssl_certfile"), (KEY, "ssl_keyfile")):
        os.environ.pop(name, None)
        if http_options.get(field):
            os.environ[name] = str(http_options[field])


def has_load_balancer() -> bool:
    """Return whether HAProxy stands in front of the gateways, according to the environment that Ray Serve reads."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"


def bind_line(ray_line: str, pem: Path) -> str:
    """Return the `bind` line that replaces Ray's `ray_line`, with TLS if the file `pem` exists."""
    indent = ray_line[: len(ray_line) - len(ray_line.lstrip())]
    _, address = ray_line.split()
    host, _, port = address.rpartition(":")
    host = {None: host, "0.0.0.0": "*", "::": "::"}.get(os.environ.get(HOST), os.environ.get(HOST, host))
    dual_stack = " v4v6" if host == "::" else ""
    tls = f" ssl crt {pem} {TLS}" if pem.exists() else ""
    return f"{indent}bind {host}:{port}{dual_stack} tcp-ut {UNACKNOWLEDGED_SECONDS}s{tls}"


def connection_limit() -> Iterator[str]:
    """Yield the lines that limit the connections of one client address, if a limit is set."""
    if limit := os.environ.get(CONNECTIONS):
        if not limit.isdecimal() or not int(limit):
            raise ConfigError(f"{CONNECTIONS} is {limit!r}, must be a positive number of connections, or unset.")
        yield "    stick-table type ipv6 size 100k expire 60s store conn_cur"
        yield "    tcp-request connection track-sc0 src"
        yield f"    tcp-request connection reject if {{ sc0_conn_cur gt {limit} }}"


def certificate_with_key() -> str | None:
    """Return the certificate and its key as one PEM text, or None without TLS. Raises `ConfigError` for an unusable
    pair.
    """
    certificate = os.environ.get(CERTIFICATE)
    key = os.environ.get(KEY)
    if not certificate and not key:
        return None
    if not certificate or not key:
        raise ConfigError(f"{KEY if certificate else CERTIFICATE} is not set: TLS needs a certificate and its key.")
    check_certificate(Path(certificate), Path(key))
    return f"{Path(certificate).read_text().strip()}\n{Path(key).read_text().strip()}\n"


def check_certificate(certificate: Path, key: Path) -> None:
    """Try a TLS handshake with the two files. If it fails, raise a `ConfigError` with the reason."""
    for file, label in ((certificate, "the certificate"), (key, "the key")):
        try:
            file.read_bytes()
        except OSError as error:
            raise ConfigError(f"TLS: {label} {file} cannot be read: {error.strerror}.") from None
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def no_password() -> str:
        raise ConfigError(f"TLS: the key {key} is encrypted. Use an unencrypted key file that only its owner can read.")

    try:
        server.load_cert_chain(certificate, key, password=no_password)
        client.load_verify_locations(certificate)
        # Accept any host name and any signer: only callers know which name they use and which signers they trust.
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _shake_hands(server, client)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"TLS: the key {key} does not belong to the certificate {certificate}.") from None
        reason = getattr(error, "verify_message", "") or error.reason or "they are not in PEM format"
        raise ConfigError(f"TLS: {certificate} and {key} cannot be used: {reason}.") from None


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Run a TLS handshake between the two contexts in memory; an expired certificate fails here."""
    to_server = ssl.MemoryBIO()
    to_client = ssl.MemoryBIO()
    caller = client.wrap_bio(to_client, to_server)
    called = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (caller, called, caller, called):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
