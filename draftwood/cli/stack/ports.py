"""Ports of a stack: free ones are picked, taken ones are refused before anything starts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

from draftwood import address
from draftwood.config import flag
from draftwood.errors import ConfigError


def free_port(host: str) -> int:
    """A port that nothing listens on now."""
    with _bound(host, 0) as listener:
        return listener.getsockname()[1]


def check_free(wanted: Iterable[tuple[str, int, str]]) -> None:
    """Takes hosts, ports and settings. Raises ConfigError naming all whose port cannot be listened on."""
    busy: list[str] = []
    field, hint = "", ""
    for host, port, setting in wanted:
        try:
            _bound(host, port).close()
        except OSError as error:
            busy.append(f"{flag(setting)} {port}: {host}:{port} cannot be listened on ({error.strerror or error})")
            field = field or setting
            if error.errno == errno.EADDRINUSE:
                hint = "Is another `draftwood up` running? Stop what uses them or give other ports; 0 picks a free one."
    if busy:
        raise ConfigError(f"{'; '.join(busy)}. {hint}".rstrip(), field=field)


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
    return address.join(reachable, port)
