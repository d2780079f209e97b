"""Shared secrets from a file, and their comparison: tokens between services, API keys of the gateway."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from draftwood.errors import ConfigError
from draftwood.security.certificates import read_file

MIN_LENGTH = 16  # of a token, in characters
SCHEME = "Bearer "


def read_tokens(path: str, flag: str) -> tuple[str, ...]:
    """Tokens of a file, one a line; empty lines and lines that begin with # are left out.

    Raises ConfigError naming flag, path and line, never the token.
    """
    text = read_file(path, flag).decode("ascii", errors="replace")
    tokens: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        token = line.strip()
        if not token or token.startswith("#"):
            continue
        if not all("!" <= letter <= "~" for letter in token):
            raise _wrong(flag, f"{path}, line {number}: a token has only visible ASCII characters, no blank")
        if len(token) < MIN_LENGTH:
            raise _wrong(flag, f"{path}, line {number}: a token has at least {MIN_LENGTH} characters, not {len(token)}")
        tokens.append(token)
    if not tokens:
        raise _wrong(flag, f"{path} holds no token")
    return tuple(tokens)


def header(token: str) -> str:
    """Value of the `authorization` header or metadata."""
    return SCHEME + token


def is_known(authorization: str, tokens: Iterable[str]) -> bool:
    """Whether a header carries one of the tokens; takes as long for a wrong one as for a right one."""
    presented = authorization[len(SCHEME) :].strip() if authorization[: len(SCHEME)].lower() == "bearer " else ""
    found = False
    for token in tokens:
        found |= hmac.compare_digest(presented.encode(), token.encode())
    return found


def _wrong(flag: str, what: str) -> ConfigError:
    return ConfigError(f"{flag} {what}", field=flag.removeprefix("--").replace("-", "_"))
