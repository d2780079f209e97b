"""Certificates and keys from PEM files, checked when a service starts: what is wrong is said with flag and path."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from draftwood.errors import ConfigError

log = logging.getLogger(__name__)

WARN_BEFORE = timedelta(days=14)


def read_file(path: str, flag: str) -> bytes:
    """A file's content. Raises ConfigError naming the flag and the path."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _wrong(flag, path, f"cannot be read ({error.strerror or error})") from error


def read_certificates(path: str, flag: str) -> bytes:
    """PEM of certificates, each of which is valid now. Raises ConfigError; warns of one that soon is not."""
    pem = read_file(path, flag)
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise _wrong(flag, path, "holds no certificate in PEM format") from error
    for certificate in certificates:
        _check_dates(certificate, path, flag)
    return pem


def is_self_signed(pem: bytes) -> bool:
    """Whether the first certificate names itself as its authority."""
    certificate = x509.load_pem_x509_certificates(pem)[0]
    return certificate.issuer == certificate.subject


def read_key(path: str, flag: str, chain: bytes, chain_path: str) -> bytes:
    """PEM of the private key of a chain's first certificate. Raises ConfigError where it belongs to another one."""
    pem = read_file(path, flag)
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError as error:
        raise _wrong(flag, path, "is encrypted; give a key without a passphrase") from error
    except ValueError as error:
        raise _wrong(flag, path, "holds no private key in PEM format") from error
    if key.public_key() != x509.load_pem_x509_certificates(chain)[0].public_key():
        raise _wrong(flag, path, f"does not belong to the certificate {chain_path}")
    return pem


def _check_dates(certificate: x509.Certificate, path: str, flag: str) -> None:
    now, name = datetime.now(UTC), certificate.subject.rfc4514_string() or "a certificate without a subject"
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if ends < now:
        raise _wrong(flag, path, f"has expired on {ends:%Y-%m-%d %H:%M} UTC ({name})")
    if begins > now:
        raise _wrong(flag, path, f"is not valid before {begins:%Y-%m-%d %H:%M} UTC ({name})")
    if ends - now < WARN_BEFORE:
        log.warning("%s %s expires on %s UTC (%s)", flag, path, f"{ends:%Y-%m-%d %H:%M}", name)


def _wrong(flag: str, path: str, what: str) -> ConfigError:
    return ConfigError(f"{flag} {path} {what}", field=flag.removeprefix("--").replace("-", "_"))
