"""Settings of the load balancer of a machine: its address, its certificate, connections per caller.

In:    the environment of Ray on that machine: `mars-ray serve` sets it for a cluster it starts, you for one of yours.
Out:   the `bind` line of HAProxy's configuration, and what limits the connections of a caller.
Never: gives host or certificate to the gateways: HAProxy speaks plain HTTP to them. Where it runs on the same machine
       they listen on the loopback interface.
"""

import os
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mars_ray.errors import ConfigError

HOST = "MARS_RAY_HTTP_HOST"
"""Address on which HAProxy listens, if it differs from that of the gateways."""
CERTIFICATE = "MARS_RAY_TLS_CERTFILE"
KEY = "MARS_RAY_TLS_KEYFILE"
CONNECTIONS = "MARS_RAY_CONNECTIONS_PER_SOURCE"
"""Largest number of connections per client address; unlimited if not set."""
BEHIND = "127.0.0.1"
"""Address on which gateways listen if the load balancer runs on the same machine."""
TLS = "alpn http/1.1 ssl-min-ver TLSv1.2"
"""No HTTP/2: the limits of heads, bodies and times are those of connections with one request at a time."""
UNACKNOWLEDGED_SECONDS = 30


def set_front(http_options: Mapping[str, Any]) -> None:
    """Write the load balancer settings of `http_options` into the environment of this process."""
    os.environ[HOST] = str(http_options["host"])
    for name, field in ((CERTIFICATE, "ssl_certfile"), (KEY, "ssl_keyfile")):
        os.environ.pop(name, None)
        if http_options.get(field):
            os.environ[name] = str(http_options[field])


def has_load_balancer() -> bool:
    """Return whether HAProxy stands in front of the gateways, by the environment Ray Serve reads."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"


def bind_line(ray_s: str, pem: Path) -> str:
    """Return the `bind` line that replaces `ray_s`, Ray's own, with TLS if the file `pem` exists."""
    indent, (_, address) = ray_s[: len(ray_s) - len(ray_s.lstrip())], ray_s.split()
    host, _, port = address.rpartition(":")
    host = {None: host, "0.0.0.0": "*", "::": "::"}.get(os.environ.get(HOST), os.environ.get(HOST, host))
    both = " v4v6" if host == "::" else ""
    tls = f" ssl crt {pem} {TLS}" if pem.exists() else ""
    return f"{indent}bind {host}:{port}{both} tcp-ut {UNACKNOWLEDGED_SECONDS}s{tls}"


def connection_limit() -> Iterator[str]:
    """Yield the lines that limit the connections of one client address, if a limit is set."""
    if most := os.environ.get(CONNECTIONS):
        if not most.isdecimal() or not int(most):
            raise ConfigError(f"{CONNECTIONS} is {most!r}; give a number of connections from 1 on, or nothing.")
        yield "    stick-table type ipv6 size 100k expire 60s store conn_cur"
        yield "    tcp-request connection track-sc0 src"
        yield f"    tcp-request connection reject if {{ sc0_conn_cur gt {most} }}"


def certificate_with_key() -> str | None:
    """Return certificate and key in one PEM text; None without TLS. Raises `ConfigError` for an unusable pair."""
    certificate, key = os.environ.get(CERTIFICATE), os.environ.get(KEY)
    if not certificate and not key:
        return None
    if not certificate or not key:
        raise ConfigError(f"{KEY if certificate else CERTIFICATE} is not set: TLS needs a certificate and its key.")
    check_certificate(Path(certificate), Path(key))
    return f"{Path(certificate).read_text().strip()}\n{Path(key).read_text().strip()}\n"


def check_certificate(certificate: Path, key: Path) -> None:
    """Raise a `ConfigError` with the reason unless a TLS handshake succeeds with the two files now."""
    for file, what in ((certificate, "the certificate"), (key, "the key")):
        try:
            file.read_bytes()
        except OSError as error:
            raise ConfigError(f"TLS: {what} {file} cannot be read: {error.strerror}.") from None
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def no_password() -> str:
        raise ConfigError(f"TLS: the key {key} is encrypted. Give one that is not, readable by its owner alone.")

    try:
        server.load_cert_chain(certificate, key, password=no_password)
        client.load_verify_locations(certificate)
        client.check_hostname = False  # callers know by which name they call
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # who signed it is for callers to judge
        _shake_hands(server, client)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"TLS: the key {key} is not that of the certificate {certificate}.") from None
        reason = getattr(error, "verify_message", "") or error.reason or "they are not in PEM format"
        raise ConfigError(f"TLS: {certificate} and {key} are of no use: {reason}.") from None


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Run a TLS handshake between the two in memory; an expired certificate fails here."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(to_client, to_server)
    called = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (caller, called, caller, called):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
