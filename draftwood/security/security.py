"""How services trust each other: TLS, certificates on both sides, and a shared token. Off until files are named.

What a service refuses ends as UNAUTHENTICATED with an ErrorInfo; what fails before, in the handshake, as UNAVAILABLE.
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
from dataclasses import dataclass, field
from typing import Self

import grpc
import grpc.aio

from draftwood.address import join
from draftwood.config import ModelConfig, PeerConfig
from draftwood.rpc.conventions import CLIENT_OPTIONS, SERVER_OPTIONS
from draftwood.rpc.grpc_decode_errors import DecodingCheck
from draftwood.security.auth_tokens import header, read_tokens
from draftwood.security.bearer import Guard, SyncToken, aio_interceptors
from draftwood.security.certificates import read_certificates, read_key

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Security:
    """Contents of the files that a PeerConfig names. Without any it is open, as `Security()` is."""

    chain: bytes | None = None  # PEM: the certificate that this side shows, and those between it and the authority
    key: bytes | None = field(default=None, repr=False)
    authorities: bytes | None = None  # PEM: who signs the certificates that this side trusts
    asks_clients: bool = False  # whether clients must show a certificate too
    tokens: tuple[str, ...] = field(default=(), repr=False)  # all are taken, the first is sent

    @classmethod
    def load(cls, config: PeerConfig) -> Self:
        """Reads and checks the files. Raises ConfigError naming flag and path."""
        chain = key = authorities = None
        if config.tls_cert:
            chain = read_certificates(config.tls_cert, "--tls-cert")
            key = read_key(config.tls_key, "--tls-key", chain, config.tls_cert)
        if config.tls_ca:
            authorities = read_certificates(config.tls_ca, "--tls-ca")
        tokens = read_tokens(config.token_file, "--token-file") if config.token_file else ()
        asks_clients = isinstance(config, ModelConfig) and config.tls_client_auth
        return cls(chain, key, authorities, asks_clients, tokens)

    def server(self) -> grpc.aio.Server:
        """A server with the project's options that asks each call for the token, where there is one."""
        guards = [Guard(self.tokens)] if self.tokens else []
        return grpc.aio.server(interceptors=[*guards, DecodingCheck()], options=SERVER_OPTIONS)

    def listen(self, server: grpc.aio.Server, host: str, port: int) -> int:
        """Opens the server's port, with TLS where there is a certificate; the port. Warns where others may reach it.

        Raises RuntimeError where the address cannot be had.
        """
        self._warn_if_open(host)
        if self.chain is None or self.key is None:
            return server.add_insecure_port(join(host, port))
        credentials = grpc.ssl_server_credentials(
            [(self.key, self.chain)], self.authorities if self.asks_clients else None, self.asks_clients
        )
        return server.add_secure_port(join(host, port), credentials)

    def _warn_if_open(self, host: str) -> None:
        if is_loopback(host):
            return
        if self.chain is None:
            log.warning("listening on %s without TLS: whoever reads the network reads every token (--tls-cert)", host)
        if not self.tokens and not self.asks_clients:
            log.warning(
                "listening on %s for everybody: neither --token-file nor --tls-client-auth says who may call", host
            )

    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel to `host:port` with the project's options."""
        interceptors = aio_interceptors(header(self.tokens[0])) if self.tokens else None
        credentials = self._channel_credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS, interceptors=interceptors)
        return grpc.aio.secure_channel(address, credentials, options=CLIENT_OPTIONS, interceptors=interceptors)

    def sync_channel(self, address: str) -> grpc.Channel:
        """The same for threads."""
        credentials = self._channel_credentials()
        if credentials is None:
            channel = grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        else:
            channel = grpc.secure_channel(address, credentials, options=CLIENT_OPTIONS)
        return grpc.intercept_channel(channel, SyncToken(header(self.tokens[0]))) if self.tokens else channel

    def _channel_credentials(self) -> grpc.ChannelCredentials | None:
        if self.authorities is None:
            return None
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.chain)


OPEN = Security()


def https_trust(authorities: str) -> ssl.SSLContext | bool:
    """What an HTTPS client trusts: the authorities in a file, or the system's without one. Raises ConfigError."""
    if not authorities:
        return True
    return ssl.create_default_context(cadata=read_certificates(authorities, "--tls-ca").decode())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
