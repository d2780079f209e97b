"""Writes the flag tables of docs/operate.md from the services' configurations.

    python -m docs.flags

The region between the two comments is this script's own: a test compares it with what the script writes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from docs.region import rewritten
from draftwood.config import Config, DraftConfig, GatewayConfig, VerifyConfig, flag

PAGE = Path(__file__).parent / "operate.md"
SERVICES: dict[str, type[Config]] = {
    "Verify service": VerifyConfig,
    "Draft service": DraftConfig,
    "Gateway": GatewayConfig,
}


def region() -> str:
    """The text between the two comments: a flag that several services have stands once, with all of them."""
    owners: dict[tuple[str, object], list[str]] = {}
    fields: dict[tuple[str, object], dataclasses.Field[object]] = {}
    for service, config in SERVICES.items():
        for spec in dataclasses.fields(config):
            key = (spec.name, spec.default)
            owners.setdefault(key, []).append(service)
            fields.setdefault(key, spec)
    groups = sorted({tuple(services) for services in owners.values()}, key=lambda group: (-len(group), group))
    return "\n\n".join(
        _table(group, [fields[key] for key, services in owners.items() if tuple(services) == group]) for group in groups
    )


def _table(services: tuple[str, ...], fields: list[dataclasses.Field[object]]) -> str:
    title = "All services" if len(services) == len(SERVICES) else " and ".join(services)
    rows = [f"| `{_spelling(spec)}` | {_default(spec)} | {spec.metadata['help']} |" for spec in fields]
    return "\n".join([f"**{title}**", "", "| flag | default | meaning |", "|---|---|---|", *rows])


def _spelling(spec: dataclasses.Field[object]) -> str:
    return f"{flag(spec.name)} / {flag('no_' + spec.name)}" if isinstance(spec.default, bool) else flag(spec.name)


def _default(spec: dataclasses.Field[object]) -> str:
    if isinstance(spec.default, bool):
        return f"`{flag(spec.name if spec.default else 'no_' + spec.name)}`"
    return f"`{spec.default}`" if spec.default != "" else "–"


def write(text: str) -> str:
    """`text` with the region replaced."""
    return rewritten(text, "flags", region())


if __name__ == "__main__":
    PAGE.write_text(write(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
