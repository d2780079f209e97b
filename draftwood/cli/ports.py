"""Ports of a stack: free ones are picked, taken ones are refused before anything starts."""

from __future__ import annotations

import socket

from draftwood.config import flag
from draftwood.errors import ConfigError


def free_port(host: str) -> int:
    """A port that nothing listens on now."""
    with _bound(host, 0) as listener:
        return listener.getsockname()[1]


def check_free(host: str, port: int, setting: str) -> None:
    """Raises ConfigError naming the setting where the port cannot be listened on."""
    try:
        _bound(host, port).close()
    except OSError as error:
        raise ConfigError(
            f"{flag(setting)} {port}: {host}:{port} cannot be listened on ({error.strerror or error}). "
            f"Stop what uses it or give another port; 0 picks a free one.",
            field=setting,
        ) from error


def _bound(host: str, port: int) -> socket.socket:
    info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(info[0], info[1])
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection in TIME_WAIT is no obstacle
        listener.bind(info[4])
        listener.listen()  # with SO_REUSEADDR only this fails where somebody listens already
    except OSError:
        listener.close()
        raise
    return listener


def join(host: str, port: int) -> str:
    """`host:port` of something that listens on `host`, as a client on this machine writes it."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"
