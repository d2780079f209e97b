"""Certificates, keys and tokens in files, right ones and wrong ones, as an operator would have them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme

from draftwood.config import PeerConfig, VerifyConfig

TOKEN, OTHER_TOKEN = "a-token-of-the-services", "a-token-of-somebody-else"
PAST = datetime(2020, 1, 1, tzinfo=UTC)
FUTURE = datetime(2100, 1, 1, tzinfo=UTC)


class Authority:
    """Writes files below a folder. `ca` is trusted, `stranger` is another authority."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authorities = {"ca": trustme.CA(), "stranger": trustme.CA()}
        for name, authority in self._authorities.items():
            authority.cert_pem.write_to_path(str(folder / f"{name}.pem"))
        (folder / "token").write_text(f"# of the services\n{TOKEN}\n")
        (folder / "other-token").write_text(f"{OTHER_TOKEN}\n")
        (folder / "both-tokens").write_text(f"{OTHER_TOKEN}\n{TOKEN}\n")
        self.issue("good")
        self.issue("foreign", signed_by="stranger")
        self.issue("elsewhere", host="elsewhere.example")
        self.issue("expired", not_before=PAST - timedelta(days=1), not_after=PAST)
        self.issue("early", not_before=FUTURE, not_after=FUTURE + timedelta(days=1))

    def issue(self, name: str, host: str = "127.0.0.1", signed_by: str = "ca", **dates: Any) -> None:
        """Writes NAME.pem and NAME-key.pem."""
        issued = self._authorities[signed_by].issue_cert(host, **dates)
        issued.private_key_pem.write_to_path(str(self._folder / f"{name}-key.pem"))
        for i, part in enumerate(issued.cert_chain_pems):
            part.write_to_path(str(self._folder / f"{name}.pem"), append=i > 0)

    def path(self, name: str) -> str:
        """Path of a file."""
        return str(self._folder / name)

    def files(self, certificate: str = "", trusts: str = "", token: str = "") -> dict[str, str]:
        """Settings by the names of certificate, authority and token file; what is empty is left out."""
        files = {"tls_cert": certificate and f"{certificate}.pem", "tls_key": certificate and f"{certificate}-key.pem"}
        files |= {"tls_ca": trusts and f"{trusts}.pem", "token_file": token}
        return {name: self.path(file) for name, file in files.items() if file}

    def peer(self, certificate: str = "", trusts: str = "", token: str = "") -> PeerConfig:
        """Settings of a client."""
        return PeerConfig(**self.files(certificate, trusts, token))

    def service(self, certificate: str = "", token: str = "", *, asks: bool = False) -> VerifyConfig:
        """Settings of a server; `asks` its clients for certificates."""
        settings: dict[str, Any] = self.files(certificate, "ca" if asks else "", token)
        return VerifyConfig(tls_client_auth=asks, **settings)
