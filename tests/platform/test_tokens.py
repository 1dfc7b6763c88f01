"""Tokens of an OpenID Connect provider let in whom their claims name, and nobody else, whatever the provider does."""

import asyncio
import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.errors import ConfigError, UnavailableError
from mars_ray.installed import settings_class
from mars_ray.platform.accounts import provider_keys
from mars_ray.platform.accounts.callers import AccountCallers, limits_of
from mars_ray.platform.accounts.provider_keys import FETCH_BYTES, REFETCH_S, RENEW_S, STALE_S, ProviderKeys
from mars_ray.platform.platform_config import OidcClaims, OidcSettings
from mars_ray.serve.deploy.serve_config import check_exposure, parse_config
from mars_ray.serve.middleware.exchange import Exchange
from tests.factories.clock import Clock
from tests.platform.issuer_samples import AUDIENCE, EC, RSA, Issuer, issuer
from tests.serve.access_samples import HOST, Client, Inner, access, bearer, call, scope_of
from tests.serve.key_samples import BY, add_key, key_file, live_keys


@pytest.fixture
def provider() -> Iterator[Issuer]:
    with issuer() as running:
        yield running


class Door:
    """The access middleware of a gateway with `oidc`."""

    def __init__(self, settings: OidcSettings, keys: Path | None = None, classes: list[str] | None = None) -> None:
        self.clock, self.inner = Clock(), Inner()
        self.keys = ProviderKeys(settings, self.clock)
        live = live_keys(keys, self.clock) if keys else None
        self.app = access(self.inner, callers=AccountCallers(live, settings, self.keys, classes=classes))

    def call(self, token: str, path: str = "/v1/x") -> Client:
        return call(self.app, scope_of(path, [HOST, bearer(token)]))

    def status(self, token: str, path: str = "/v1/x") -> int:
        return self.call(token, path).status

    @property
    def exchange(self) -> Exchange:
        return Exchange.of(self.inner.scopes[-1])


@pytest.fixture
def door(provider: Issuer) -> Door:
    return Door(provider.settings)


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


# --- who comes in ---


@pytest.mark.parametrize(("kid", "algorithm"), [("one", "RS256"), ("ec", "ES256")])
def test_a_token_of_the_provider_lets_in_its_account(provider: Issuer, door: Door, kid: str, algorithm: str) -> None:
    assert door.status(provider.token(kid, algorithm)) == 200
    exchange = door.exchange
    assert (exchange.key, exchange.owner) == ("oidc:ann", "ann")
    assert (exchange.service_class, limits_of(exchange), exchange.operator) == ("standard", {}, "oidc:ann")
    assert door.status(provider.token(kid, algorithm), "/metrics") == 403


def test_a_list_of_audiences_and_clocks_that_differ_a_little_are_accepted(provider: Issuer, door: Door) -> None:
    now = time.time()
    assert door.status(provider.token(aud=["other", AUDIENCE])) == 200
    assert door.status(provider.token(exp=now - 10)) == 200
    assert door.status(provider.token(nbf=now + 10, iat=now + 10)) == 200


def test_a_token_without_the_id_of_a_key_is_checked_if_the_provider_has_one_key(provider: Issuer, door: Door) -> None:
    provider.kids = ["one"]
    assert door.status(provider.token(kid=None)) == 200
    provider.kids = ["one", "two"]
    door.clock.now_s += STALE_S
    assert door.status(provider.token(kid=None)) == 401


def test_class_and_limits_of_the_account_hold_for_its_tokens(provider: Issuer, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = add_key(path, "ada", "use", account="team")
    key_file(path).set_account(BY, name="team", service_class="gold", limits={"tokens_per_day": 7})
    settings = provider.settings.model_copy(update={"claims": OidcClaims(account="org.team")})
    door = Door(settings, path, ["standard", "gold"])
    for presented in (provider.token(org={"team": "team"}), key):
        assert door.status(presented) == 200
        assert (door.exchange.owner, door.exchange.service_class) == ("team", "gold")
        assert {holder: limits.tokens_per_day for holder, limits in limits_of(door.exchange).items()} == {
            "account:team": 7
        }


def test_roles_and_classes_come_from_claims_only_where_they_are_named(provider: Issuer) -> None:
    claims: dict[str, Any] = {"roles": ["a", "operate"], "tier": "gold"}
    plain = Door(provider.settings, classes=["standard", "gold"])
    assert plain.status(provider.token(**claims), "/metrics") == 403
    assert plain.status(provider.token(**claims)) == 200 and plain.exchange.service_class == "standard"
    names = OidcClaims(role="roles", service_class="tier")
    door = Door(provider.settings.model_copy(update={"claims": names}), classes=["standard", "gold"])
    assert door.status(provider.token(**claims), "/metrics") == 200 and door.exchange.service_class == "gold"
    assert door.status(provider.token(roles="operate"), "/metrics") == 200
    for roles in ("operator", ["use"], {"operate": True}, True, None):
        assert door.status(provider.token(roles=roles), "/metrics") == 403
    refused = door.call(provider.token(tier="platinum"))
    assert (refused.status, refused.error["code"]) == (403, "access_not_sufficient")


@pytest.mark.parametrize("account", ["two words", "", "a" * 129, "a/b", "a\nb", ["a", "b"], [], {"a": 1}, 5, None])
def test_a_token_whose_claim_names_no_account_is_refused(provider: Issuer, account: Any) -> None:
    door = Door(provider.settings.model_copy(update={"claims": OidcClaims(account="team")}))
    assert door.status(provider.token(team=account)) == 403
    assert door.inner.scopes == []


# --- who stays out ---


def bad_tokens(provider: Issuer) -> Iterator[tuple[str, str]]:
    now = time.time()
    good = provider.token()
    head, body, signature = good.split(".")
    yield "unsigned", provider.token(kid="one", algorithm="none", key="")
    pem = RSA["one"].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    forged = f"{b64(json.dumps({'alg': 'HS256', 'typ': 'JWT', 'kid': 'one'}).encode())}.{body}"
    yield "HS256 by the public key", f"{forged}.{b64(hmac.new(pem, forged.encode(), hashlib.sha256).digest())}"
    yield "HS256 by a key among the provider's", provider.token(None, "HS256", b"\0" * 32)
    yield "another issuer", provider.token(iss="https://evil.example")
    yield "no issuer", provider.token(iss=None)
    yield "another audience", provider.token(aud="other")
    yield "no audience", provider.token(aud=None)
    yield "expired", provider.token(exp=now - 60)
    yield "no expiry", provider.token(exp=None)
    yield "not valid yet", provider.token(nbf=now + 60)
    yield "unknown key", provider.token("two")
    yield "key of another kind", provider.token("ec", "RS256", RSA["one"])
    yield "algorithm that is not listed", provider.token(algorithm="RS512")
    yield "signed by another", provider.token("one", "RS256", RSA["two"])
    yield "EC by the id of an RSA key", provider.token("one", "ES256", EC)
    yield "changed claims", f"{head}.{b64(json.dumps({'sub': 'root'}).encode())}.{signature}"
    yield "cut signature", good[:-8]
    yield "no signature", f"{head}.{body}."
    yield "long", provider.token(note="x" * 7000)
    yield "deep head", f"{b64(b'[' * 3000)}.{body}.{signature}"
    yield "head that is a list", f"{b64(b'[]')}.{body}.{signature}"
    listed = json.dumps({"alg": "RS256", "kid": ["one"]}).encode()
    yield "id of a key that is a list", f"{b64(listed)}.{body}.{signature}"
    yield "endless expiry", jwt_with(provider, b'"exp":1e999')
    yield "huge expiry", jwt_with(provider, b'"exp":' + b"9" * 4400)
    yield "claims that are a list", signed(b"[]")
    yield "dots", ".."


def signed(claims: bytes) -> str:
    return jwt.api_jws.encode(claims, RSA["one"], "RS256", headers={"kid": "one"})


def jwt_with(provider: Issuer, field: bytes) -> str:
    return signed(b'{"iss":"%s","aud":"mars","sub":"ann",%s}' % (provider.url.encode(), field))


def test_a_bad_token_is_401_and_is_not_told_why(provider: Issuer, door: Door) -> None:
    for kind, token in bad_tokens(provider):
        client = door.call(token)
        assert (kind, client.status) == (kind, 401)
        assert client.headers[b"www-authenticate"] == b"Bearer"
        said = client.error
        assert (said["type"], said["code"]) == ("authentication_error", "invalid_token")
        assert said["message"] == "The token is not valid: check its signature, issuer, audience and time."
    assert door.inner.scopes == []
    assert door.status(provider.token()) == 200


PARTS = st.one_of(
    st.binary(max_size=40).map(b64),
    st.dictionaries(st.sampled_from(["alg", "kid", "exp", "b64", "crit"]), st.sampled_from(["RS256", 1, None, []]))
    .map(json.dumps)
    .map(lambda text: b64(text.encode())),
    st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=20),
)


@given(st.lists(PARTS, min_size=3, max_size=3))
def test_no_text_with_two_dots_is_let_in_or_an_error_of_the_server(door: Door, parts: list[str]) -> None:
    assert door.status(".".join(parts)) == 401


def test_without_oidc_a_token_is_an_unknown_key_and_nobody_is_asked(provider: Issuer, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    add_key(path, "ada", "use")
    app = access(Inner(), callers=AccountCallers(live_keys(path)))
    client = call(app, scope_of("/v1/x", [HOST, bearer(provider.token())]))
    assert (client.status, client.error["code"], provider.asked) == (401, "invalid_api_key", 0)


# --- the provider ---


def test_strangers_cannot_make_us_ask_the_provider_again_and_again(provider: Issuer, door: Door) -> None:
    assert door.status(provider.token()) == 200
    for number in range(20):
        assert door.status(provider.token(f"k{number}", key=RSA["two"])) == 401
    assert provider.asked == 1
    door.clock.now_s += REFETCH_S
    for number in range(20):
        assert door.status(provider.token(f"k{number}", key=RSA["two"])) == 401
    assert provider.asked == 2


def test_a_new_key_of_the_provider_is_found_and_a_withdrawn_one_is_forgotten(provider: Issuer, door: Door) -> None:
    assert door.status(provider.token("one")) == 200
    provider.kids = ["two"]
    door.clock.now_s += REFETCH_S
    assert door.status(provider.token("two")) == 200
    assert door.status(provider.token("one")) == 401


def test_keys_are_renewed_without_an_unknown_one(provider: Issuer, door: Door) -> None:
    assert door.status(provider.token("one")) == 200
    provider.kids = ["two"]
    door.clock.now_s += RENEW_S
    # The first caller still gets in by the old key while the new ones are fetched.
    assert door.status(provider.token("one")) == 200
    door.clock.now_s += REFETCH_S
    assert door.status(provider.token("two")) == 200


def test_while_the_provider_is_away_its_keys_hold_for_a_day_and_no_longer(provider: Issuer, door: Door) -> None:
    assert door.status(provider.token()) == 200
    provider.status = 503
    door.clock.now_s += STALE_S - 1
    assert door.status(provider.token()) == 200
    door.clock.now_s += 1
    client = door.call(provider.token())
    assert (client.status, client.error["code"]) == (503, "unavailable")
    assert b"retry-after" in client.headers


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"status": 500}, "500"),
        ({"status": 302}, "302"),
        ({"body": b"<html>"}, "Expecting value"),
        ({"body": b"[]"}, "JSON object"),
        ({"body": b"{}"}, "did not contain any keys"),
        ({"body": b'{"keys": [{"kty": "RSA"}]}'}, "did not contain any usable keys"),
        ({"body": b"[" * 100_000}, "recursion"),
        ({"body": b" " * (FETCH_BYTES + 1)}, f"sends more than {FETCH_BYTES} bytes"),
        ({"discovered": {"issuer": "https://evil.example"}}, "is about the issuer 'https://evil.example'"),
        ({"discovered": {"issuer": "", "jwks_uri": "http://10.0.0.1/keys"}}, "is about the issuer"),
    ],
)
def test_a_provider_that_answers_nonsense_is_503_and_asked_seldom_and_the_log_says_why(
    provider: Issuer, door: Door, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], said: str
) -> None:
    for name, value in fields.items():
        setattr(provider, name, value)
    assert [door.status(provider.token()) for _ in range(3)] == [503] * 3
    assert provider.asked <= 1
    assert len(caplog.messages) == 1 and said in caplog.text
    for name, value in {"status": 200, "body": None, "discovered": None}.items():
        setattr(provider, name, value)
    door.clock.now_s += REFETCH_S
    assert door.status(provider.token()) == 200


def test_keys_are_fetched_only_from_where_nobody_in_between_can_answer(
    provider: Issuer, door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    provider.discovered = {"issuer": provider.url, "jwks_uri": "http://10.0.0.1/keys"}
    assert door.status(provider.token()) == 503
    assert "names no jwks_uri with https://" in caplog.text


def test_a_provider_that_hangs_keeps_callers_for_a_bounded_time(
    provider: Issuer, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_keys, "FETCH_S", 0.2)
    provider.hangs = threading.Event()
    assert door.status(provider.token()) == 503
    assert door.status(provider.token()) == 503
    assert provider.asked == 1


def test_a_fetch_from_a_provider_that_never_finishes_its_answer_ends(
    provider: Issuer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(provider_keys, "FETCH_S", 1.0)
    provider.drips = True

    async def run() -> None:
        keys = ProviderKeys(provider.settings, Clock())
        while not caplog.messages:
            with pytest.raises(UnavailableError):
                await keys.get("one")

    asyncio.run(run())
    assert f"{provider.url}/keys did not answer completely within 1 s" in caplog.text


def test_a_provider_that_is_not_there_is_503() -> None:
    with issuer() as gone:
        token, door = gone.token(), Door(gone.settings)
    assert door.status(token) == 503


# --- settings ---

SETTINGS = {"issuer": "https://id.example", "audience": "mars"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"issuer": "http://id.example"}, "must be an https:// URL"),
        ({"issuer": "id.example"}, "must be an https:// URL"),
        ({"jwks_url": "file:///etc/passwd"}, "must be an https:// URL"),
        ({"jwks_url": "https://["}, "must be an https:// URL"),
        ({"algorithms": ["HS256"]}, "oidc.algorithms"),
        ({"algorithms": ["none"]}, "oidc.algorithms"),
        ({"algorithms": []}, "oidc.algorithms"),
        ({"audience": ""}, "oidc.audience"),
        ({"leeway_s": 3600}, "oidc.leeway_s"),
        ({"secret": "x"}, "unknown field 'secret'"),
        ({"claims": {"user": "sub"}}, "unknown field 'user'"),
    ],
)
def test_a_setting_that_is_not_safe_or_not_known_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(settings_class(), {"oidc": SETTINGS | fields})
    assert said in str(caught.value)


def test_with_tokens_alone_the_endpoint_may_listen_everywhere() -> None:
    check_exposure("0.0.0.0", parse_config(settings_class(), {"oidc": SETTINGS}))
    with pytest.raises(ConfigError):
        check_exposure("0.0.0.0", parse_config(settings_class(), {"storage": "/tmp/x"}))


def test_keys_in_the_storage_need_a_storage() -> None:
    assert parse_config(settings_class(), {"keys": "storage", "storage": "s3://bucket/mars"}).keys == "storage"
    assert parse_config(settings_class(), {"keys": "./storage"}).keys == Path("storage")
    with pytest.raises(ConfigError, match="no storage is set"):
        parse_config(settings_class(), {"keys": "storage"})
