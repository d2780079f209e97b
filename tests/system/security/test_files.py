"""Files are checked at the start: what is wrong is said with the flag and the path, and never with the secret."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from draftwood.config import GatewayConfig, PeerConfig, VerifyConfig
from draftwood.errors import ConfigError
from draftwood.security.auth_tokens import header, is_known, read_tokens
from draftwood.security.security import Security, is_loopback
from gateway.api.served_model import ServedModel
from gateway.http.http_server import Server
from tests.support.authority import OTHER_TOKEN, TOKEN, Authority


def failure(**files: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Security.load(PeerConfig(**files))
    return caught.value


def test_what_is_right_is_read(authority: Authority) -> None:
    security = Security.load(authority.service("good", "token", asks=True))
    assert security.chain is not None
    assert security.chain.startswith(b"-----BEGIN CERTIFICATE-----")
    assert (security.asks_clients, security.tokens) == (True, (TOKEN,))
    assert TOKEN not in repr(security)
    assert "PRIVATE" not in repr(security)
    assert Security.load(PeerConfig()) == Security()


@pytest.mark.parametrize(
    ("certificate", "words"),
    [("expired", "has expired on 2020-01-01 00:00 UTC"), ("early", "is not valid before 2100-01-01 00:00 UTC")],
)
def test_dates(authority: Authority, certificate: str, words: str) -> None:
    error = failure(**authority.files(certificate))
    assert error.message.startswith(f"--tls-cert {authority.path(certificate)}.pem {words}")
    assert error.field == "tls_cert"


def test_a_certificate_that_expires_soon(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    authority.issue(
        "soon", not_before=datetime(2020, 1, 1, tzinfo=UTC), not_after=datetime.now(UTC) + timedelta(days=3)
    )
    Security.load(authority.peer("soon"))
    assert f"--tls-cert {authority.path('soon.pem')} expires on " in caplog.text


def test_files_that_are_missing_or_no_pem(authority: Authority) -> None:
    files = authority.files("good")
    for name in ("tls_cert", "tls_key"):
        error = failure(**(files | {name: authority.path("nowhere.pem")}))
        assert (
            error.message
            == f"--{name.replace('_', '-')} {authority.path('nowhere.pem')} cannot be read (No such file or directory)"
        )
        assert error.field == name
    token = authority.path("token")
    assert failure(**(files | {"tls_cert": token})).message == f"--tls-cert {token} holds no certificate in PEM format"
    assert failure(**(files | {"tls_key": token})).message == f"--tls-key {token} holds no private key in PEM format"
    assert failure(tls_ca=token).message == f"--tls-ca {token} holds no certificate in PEM format"
    assert failure(token_file=authority.path("gone")).field == "token_file"


def test_keys_of_others_and_encrypted_ones(authority: Authority, tmp_path: Path) -> None:
    files, other = authority.files("good"), authority.path("foreign-key.pem")
    assert failure(**(files | {"tls_key": other})).message == (
        f"--tls-key {other} does not belong to the certificate {authority.path('good.pem')}"
    )
    key: Any = load_pem_private_key(Path(authority.path("good-key.pem")).read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    assert "is encrypted; give a key without a passphrase" in failure(**(files | {"tls_key": str(locked)})).message


def test_settings_that_need_each_other() -> None:
    cases: list[tuple[type[PeerConfig], dict[str, Any], str, str]] = [
        (PeerConfig, {"tls_cert": "a.pem"}, "--tls-cert a.pem needs --tls-key", "tls_key"),
        (PeerConfig, {"tls_key": "a.pem"}, "--tls-key a.pem needs --tls-cert", "tls_cert"),
        (GatewayConfig, {"https_cert": "a.pem"}, "--https-cert a.pem needs --https-key", "https_key"),
        (VerifyConfig, {"tls_client_auth": True}, "--tls-client-auth needs --tls-cert", "tls_cert"),
        (
            VerifyConfig,
            {"tls_client_auth": True, "tls_cert": "a", "tls_key": "b"},
            "--tls-client-auth needs --tls-ca",
            "tls_ca",
        ),
    ]
    for config, settings, message, field in cases:
        with pytest.raises(ConfigError) as caught:
            config(**settings)
        assert (caught.value.message, caught.value.field) == (message, field)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n\n", "holds no token"),
        ("short\n", "line 1: a token has at least 16 characters, not 5"),
        (f"{TOKEN}\n two words are no token\n", "line 2: a token has only visible ASCII characters, no blank"),
        ("schlüssel-schlüssel\n", "line 1: a token has only visible ASCII characters, no blank"),
    ],
)
def test_tokens_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_tokens(str(path), "--token-file")
    assert caught.value.message.startswith(f"--token-file {path}")
    assert caught.value.message.endswith(message)
    assert "words" not in caught.value.message


def test_tokens_are_compared_whole() -> None:
    tokens = (OTHER_TOKEN, TOKEN)
    assert is_known(header(TOKEN), tokens)
    assert is_known(f"bearer  {OTHER_TOKEN} ", tokens)
    for wrong in ("", "Bearer ", TOKEN, f"Basic {TOKEN}", header(TOKEN[:-1]), header(TOKEN + "x"), "Bearer ü"):
        assert not is_known(wrong, tokens)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "", "10.0.0.7", "verify.example")],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_gateway_with_a_wrong_file_does_not_start(authority: Authority, model: ServedModel) -> None:
    cases: dict[str, dict[str, Any]] = {
        "--https-cert": {"https_cert": authority.path("expired.pem"), "https_key": authority.path("expired-key.pem")},
        "--https-key": {"https_cert": authority.path("good.pem"), "https_key": authority.path("foreign-key.pem")},
        "--api-key-file": {"api_key_file": authority.path("gone")},
        "--token-file": {"token_file": authority.path("gone")},
    }
    for flag, files in cases.items():
        with pytest.raises(ConfigError, match=f"^{flag} "):
            Server.bind(GatewayConfig(port=0, **files), model)


async def test_open_services_warn(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    def warnings(host: str, security: Security) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            security.listen(security.server(), host, 0)
        return [record.getMessage().split(":")[0] for record in caplog.records]

    without_tls, for_everybody = "listening on 0.0.0.0 without TLS", "listening on 0.0.0.0 for everybody"
    assert warnings("0.0.0.0", Security()) == [without_tls, for_everybody]
    assert warnings("0.0.0.0", Security.load(authority.service("", "token"))) == [without_tls]
    assert warnings("0.0.0.0", Security.load(authority.service("good"))) == [for_everybody]
    assert warnings("0.0.0.0", Security.load(authority.service("good", asks=True))) == []
    assert warnings("127.0.0.1", Security()) == []
