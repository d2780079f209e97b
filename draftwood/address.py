"""Hosts and ports as one text."""

from __future__ import annotations


def join(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in the brackets without which its last part would be taken for the port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
