"""An OpenID Connect provider on a port of this machine, and the tokens that it signs."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from mars_ray.platform.platform_config import OidcSettings

RSA = {kid: rsa.generate_private_key(65537, 2048) for kid in ("one", "two")}
EC = ec.generate_private_key(ec.SECP256R1())
AUDIENCE = "mars"


@dataclass
class Issuer:
    """What the provider answers, and how often it was asked for its keys."""

    url: str
    kids: list[str] = field(default_factory=lambda: ["one", "ec"])
    status: int = 200
    body: bytes | None = None
    """Answer in place of the keys."""
    discovered: dict[str, Any] | None = None
    asked: int = 0
    hangs: threading.Event | None = None
    """Answers wait for this."""
    drips: bool = False
    """Whether the keys come as a space every 10 ms for five seconds, so that no single read takes long."""

    @property
    def settings(self) -> OidcSettings:
        return OidcSettings(issuer=self.url, audience=AUDIENCE, leeway_s=30)

    def keys(self) -> bytes:
        if self.body is not None:
            return self.body
        keys = [
            {"kid": kid, "use": "sig", **json.loads(RSAAlgorithm.to_jwk(RSA[kid].public_key()))}
            for kid in self.kids
            if kid in RSA
        ]
        if "ec" in self.kids:
            keys.append({"kid": "ec", **json.loads(ECAlgorithm.to_jwk(EC.public_key()))})
        # Keys that this version cannot use stand among those of real providers.
        return json.dumps({"keys": [*keys, {"kty": "new", "kid": "x"}, {"kid": 5}, {"kty": "oct", "k": "AA"}]}).encode()

    def token(self, kid: str | None = "one", algorithm: str = "RS256", key: Any = None, **claims: Any) -> str:
        """A token with these claims; None drops a claim."""
        now = int(time.time())
        fields = {"iss": self.url, "aud": AUDIENCE, "sub": "ann", "exp": now + 600, "iat": now} | claims
        kept = {name: value for name, value in fields.items() if value is not None}
        signing = key if key is not None else EC if kid == "ec" else RSA[kid or "one"]
        return jwt.encode(kept, signing, algorithm, headers={"kid": kid} if kid else None)


@contextmanager
def issuer() -> Iterator[Issuer]:
    """Run a provider within the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/.well-known/openid-configuration":
                found = running.discovered or {"issuer": running.url, "jwks_uri": f"{running.url}/keys"}
                self.answer(200, json.dumps(found).encode())
                return
            running.asked += 1
            if running.hangs:
                running.hangs.wait(60)
            if running.drips:
                self.drip()
            else:
                self.answer(running.status, running.keys())

        def drip(self) -> None:
            try:
                self.send_response(200)
                self.end_headers()
                for _ in range(500):
                    self.wfile.write(b" ")
                    time.sleep(0.01)
            except OSError:
                pass  # the endpoint has left

        def answer(self, status: int, body: bytes) -> None:
            try:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.send_header("location", "/elsewhere")
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass  # the endpoint has left

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running = Issuer(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield running
    finally:
        if running.hangs:
            running.hangs.set()
        server.shutdown()
        thread.join()
        server.server_close()
