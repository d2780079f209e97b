"""What to ask a gateway first, as lines to copy: with the files that its certificate and keys call for."""

from __future__ import annotations

from shlex import quote

from draftwood.config import GatewayConfig
from draftwood.security.certificates import is_self_signed, read_file

QUESTION = "Why is sleep important?"


def first_question(config: GatewayConfig, url: str) -> str:
    """A call of curl and one of `draftwood chat`; `url` is the API's."""
    curl, chat = ["curl", "-N"], ["draftwood", "chat", "--url", url]
    if authority := _authority(config):
        curl += ["--cacert", quote(authority)]
        chat += ["--tls-ca", quote(authority)]
    if config.api_key_file:
        file = quote(config.api_key_file)
        curl += ["-H", f"\"Authorization: Bearer $(grep -m1 '^[^#[:space:]]' {file})\""]
        chat += ["--api-key-file", file]
    rest = '"max_tokens": 64, "temperature": 0, "stream": true'
    body = f'{{"messages": [{{"role": "user", "content": "{QUESTION}"}}], {rest}}}'
    curl += [f"{url}/chat/completions", "-H 'Content-Type: application/json'", f"-d '{body}'"]
    chat.append(f'"{QUESTION}"')
    return f"Try:  {' '.join(curl)}\nor:   {' '.join(chat)}"


def _authority(config: GatewayConfig) -> str:
    """The file that says whom to trust: --tls-ca, or a certificate that vouches for itself; none for a public one."""
    if not config.https_cert:
        return ""
    if config.tls_ca:
        return config.tls_ca
    return config.https_cert if is_self_signed(read_file(config.https_cert, "--https-cert")) else ""
