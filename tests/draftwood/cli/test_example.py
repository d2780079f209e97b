"""The lines that `draftwood up` shows reach the gateway as it is set up."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from draftwood.cli.example import first_question
from draftwood.config import GatewayConfig
from draftwood.security.security import Security
from gateway.api.served_model import ServedModel
from tests.gateway.conftest import running_gateway
from tests.gateway.fake_verify import FakeVerify, serve
from tests.support.authority import Authority


def self_signed(folder: Path) -> dict[str, str]:
    """As `openssl req -x509` makes one."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    (folder / "own.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "own-key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return {"https_cert": str(folder / "own.pem"), "https_key": str(folder / "own-key.pem"), "host": "localhost"}


def shims(folder: Path) -> dict[str, str]:
    """An environment whose `draftwood` is this one, and whose `curl` prints its arguments."""
    for name, what in (
        ("draftwood", 'exec {} -m draftwood.cli "$@"'),
        ("curl", '{} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"'),
    ):
        file = folder / name
        file.write_text(f"#!/bin/sh\n{what.format(sys.executable)}\n")
        file.chmod(0o755)
    return dict(os.environ) | {"PATH": f"{folder}:{os.environ['PATH']}"}


async def shell(line: str, environment: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", line, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


async def ask(arguments: list[str]) -> int:
    """What curl would do with them; the status."""
    given: dict[str, Any] = dict(pairwise(arguments))
    headers = [arguments[i + 1].partition(": ") for i, word in enumerate(arguments) if word == "-H"]
    (url,) = (word for word in arguments if word.startswith("http"))
    trust = ssl.create_default_context(cafile=given.get("--cacert"))
    async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
        response = await client.post(url, content=given["-d"], headers={name: value for name, _, value in headers})
    assert "data: [DONE]" in response.text
    return response.status_code


@pytest.mark.parametrize("kind", ["plain", "key", "authority", "self-signed", "all"])
async def test_its_lines_are_answered(authority: Authority, model: ServedModel, tmp_path: Path, kind: str) -> None:
    files: dict[str, Any] = {}
    if kind == "self-signed":
        files |= self_signed(tmp_path)
    if kind in ("authority", "all"):
        files |= {"https_cert": authority.path("good.pem"), "https_key": authority.path("good-key.pem")}
        files |= {"tls_ca": authority.path("ca.pem")}
    if kind in ("key", "all"):
        keys = tmp_path / "the keys"
        keys.write_text("# of users\n\na-key-of-sixteen-letters\nanother-of-as-many-letters\n")
        files |= {"api_key_file": str(keys)}
    trusting = "ca" if "tls_ca" in files else ""
    security = Security.load(authority.service("good" if trusting else ""))
    async with serve(FakeVerify(), security=security) as port:
        config = GatewayConfig(port=0, verify=f"127.0.0.1:{port}", **files)
        async with running_gateway(config, model) as url:
            named = url.replace("127.0.0.1", "localhost") if kind == "self-signed" else url
            example = first_question(config, f"{named}/v1")
            curl, chat = (line[len("Try:  ") :] for line in example.splitlines())
            environment = shims(tmp_path)
            assert await ask(json.loads(await shell(curl, environment))) == 200
            await shell(chat, environment)
