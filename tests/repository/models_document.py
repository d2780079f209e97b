"""Writes the table of families in docs/models.md from what the tests hold to transformers.

    python -m tests.repository.models_document

The region between the two comments is this script's own: a test compares it with what the script writes.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import docs.region
from tests.verify_service.models import FAMILIES, tiny_config
from verify_service.model.spec import read_spec

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
NAMES = {"attention": "attention", "gdn": "Gated DeltaNet", "mamba2": "Mamba2", "short convolution": "convolution"}
COLUMNS = ("model type", "mixers", "what is special", "exactness tested with")


def region() -> str:
    """The text between the two comments."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    lines += [
        (f"`{name}`", _mixers(name), family.special or "–", _modes(family.modes)) for name, family in FAMILIES.items()
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def rewritten(text: str) -> str:
    """The text with the region replaced. Raises ValueError where its comments are not there once and in order."""
    return docs.region.rewritten(text, "families", region())


def _mixers(model_type: str) -> str:
    """The mixers of the family's tiny model, in order of appearance."""
    mixers = read_spec(tiny_config(model_type), ()).mixers
    return ", ".join(NAMES[mixer] for mixer in dict.fromkeys(chain(*mixers)))


def _modes(modes: tuple[str, ...]) -> str:
    """`no drafts; chain of 15; trees of 1, 15 nodes`."""
    sizes: dict[str, list[str]] = {}
    for mode in modes:
        algorithm, nodes = mode.split()
        sizes.setdefault(algorithm, []).append(nodes)
    words = {"none": "no drafts", "chain": f"chains of {', '.join(sizes.get('chain', []))}"}
    words["tree"] = f"trees of {', '.join(sizes.get('tree', []))}"
    return "; ".join(words[algorithm] for algorithm in sizes)


def main() -> None:
    """Rewrites docs/models.md."""
    DOCUMENT.write_text(rewritten(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
