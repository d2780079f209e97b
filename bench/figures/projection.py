"""Speed that measured step times and a measured acceptance would give together. Always a projection. Pure functions.

    tokens/s = batch * tokens per step / (verify step + idle + draft pass + transport)

Step times are read from what `benchmarks/step.py` writes, of which these keys count:

    shape, gpu            names
    rows                  [{batch, nodes, context, step}], step in ms; a tree is padded to the next nodes measured
    idle_ms               between two steps, optional
    draft                 [{batch, pass_ms, transport_ms}], optional: a draft pass with its tree, and both ways there

or draft passes from what `benchmarks/draft.py` writes: rows of {batch, with_7_new_rows_ms}; the longest counts.

An acceptance profile is a JSON object:

    name, source          what it is and where it comes from
    chain                 for each depth from 1 on, the share of drafted steps that accept at least so deep
    tree                  tokens per step, the bonus token included, by tree budget

or what `draftwood bench decode --json` or `sweep --json` wrote, whose longest chain and trees are taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import draftwood
from draftwood.errors import InvalidRequestError

SHIPPED_PROFILE = Path(draftwood.__file__).parent / "profiles" / "sprout-heldout-48.json"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured stage times of a shape, in milliseconds."""

    shape: str
    gpu: str
    context: int
    steps: Mapping[tuple[int, int], float]  # (batch, nodes with the root)
    idle: float
    draft: Mapping[int, tuple[float, float]]  # by batch: pass, transport

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises InvalidRequestError naming the file and the key at fault."""
        data = _json(path)
        try:
            rows: Sequence[Mapping[str, Any]] = data["rows"]
            contexts = {int(row["context"]) for row in rows}
            if len(contexts) != 1:
                raise InvalidRequestError(f"{path}: rows of {len(contexts)} contexts, not one", field="context")
            drafts: Sequence[Mapping[str, Any]] = data.get("draft", ())
            return cls(
                shape=str(data["shape"]),
                gpu=str(data["gpu"]),
                context=contexts.pop(),
                steps={(int(row["batch"]), int(row["nodes"])): float(row["step"]) for row in rows},
                idle=float(data.get("idle_ms", 0.0)),
                draft={int(d["batch"]): (float(d["pass_ms"]), float(d.get("transport_ms", 0.0))) for d in drafts},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"{path} has no step times: {error!r}", field="steps") from error

    def with_draft(self, path: Path) -> Self:
        """With the draft passes of another file. Raises InvalidRequestError naming it."""
        longest: dict[int, tuple[float, float]] = {}
        try:
            for row in _json(path)["rows"]:
                batch, ms = int(row["batch"]), float(row["with_7_new_rows_ms"])
                longest[batch] = max(longest.get(batch, (0.0, 0.0)), (ms, 0.0))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"{path} has no draft passes: {error!r}", field="draft") from error
        return replace(self, draft=longest)

    @property
    def batches(self) -> list[int]:
        """Batches measured."""
        return sorted({batch for batch, _ in self.steps})

    def padded(self, batch: int, nodes: int) -> int | None:
        """The fewest nodes measured that hold `nodes`."""
        return min((n for b, n in self.steps if b == batch and n >= nodes), default=None)


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """How far a target follows a drafter."""

    name: str
    source: str
    chain: tuple[float, ...]
    tree: Mapping[int, float]

    @classmethod
    def read(cls, path: Path) -> Self:
        """A profile, or a result of `bench decode` or `bench sweep`. Raises InvalidRequestError naming the file."""
        data = _json(path)
        try:
            if "results" in data:
                return cls.of_results(data, path.name)
            tree = {int(budget): float(tokens) for budget, tokens in data["tree"].items()}
            return cls(str(data["name"]), str(data["source"]), tuple(float(x) for x in data["chain"]), tree)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequestError(f"{path} has no acceptance profile: {error!r}", field="profile") from error

    @classmethod
    def of_results(cls, data: Mapping[str, Any], name: str) -> Self:
        """From a measured experiment."""
        chains: dict[int, tuple[float, ...]] = {}
        trees: dict[int, float] = {}
        for row in data["results"]:
            algorithm, _, size = str(row["configuration"]).partition(" ")
            if algorithm == "dflash":
                chains[int(size)] = tuple(round(float(rate), 4) for rate in row["acceptance_by_depth"])
            elif algorithm == "ddtree":
                trees[int(size)] = round(float(row["tokens_per_step"]), 4)
        target, experiment = data["target"], data["experiment"]
        source = (
            f"{target['model_id']} with {target['draft_model_id']}, {target['dtype']}, temperature "
            f"{experiment['temperature']}, {experiment['num_prompts']} prompts of {experiment['prompts']}, answers of "
            f"{experiment['mean_answer_tokens']:.0f} tokens; commit {data['commit'][:10]}: {data['command']}"
        )
        return cls(Path(name).stem, source, chains[max(chains)] if chains else (), trees)

    def to_json(self) -> dict[str, Any]:
        """The object that `read` takes."""
        tree = {str(budget): tokens for budget, tokens in self.tree.items()}
        return {"name": self.name, "source": self.source, "chain": list(self.chain), "tree": tree}

    def chain_tokens(self, length: int) -> float:
        """Tokens per step of a chain, the bonus token included."""
        return 1.0 + sum(self.chain[:length])


@dataclass(frozen=True, slots=True)
class Projected:
    """One configuration."""

    configuration: str
    batch: int
    nodes: int  # verified, padding included
    tokens_per_step: float
    ms_per_step: float
    tokens_per_s: float
    ratio_to_none: float | None


def project(
    times: StepTimes, profile: AcceptanceProfile, chains: Sequence[int], *, draft: float | None, transport: float | None
) -> list[Projected]:
    """No drafts, chains and trees at every batch measured; what no measured step holds is left out, and what is drafted
    where no draft pass of that batch is known.

    `draft` and `transport`, in ms, take the place of what was measured, at every batch. Raises InvalidRequestError
    where no draft pass is known at all.
    """
    if draft is None and not times.draft:
        raise InvalidRequestError("no draft pass among the step times: give --draft or --draft-ms", field="draft_ms")
    rows: list[Projected] = []
    for batch in times.batches:
        measured = times.draft.get(batch)
        pass_ms = draft if draft is not None else (measured[0] if measured else None)
        there_ms = transport if transport is not None else (measured[1] if measured else 0.0)
        ways = [("none", 1, 1.0, 0.0)]
        if pass_ms is not None:
            extra = pass_ms + there_ms
            ways += [(f"chain {n}", n + 1, profile.chain_tokens(n), extra) for n in chains if n <= len(profile.chain)]
            ways += [(f"tree {n}", n + 1, tokens, extra) for n, tokens in sorted(profile.tree.items())]
        none: float | None = None
        for name, nodes, tokens, extra in ways:
            padded = times.padded(batch, nodes)
            if padded is None:
                continue
            ms = times.steps[batch, padded] + times.idle + extra
            speed = batch * tokens / ms * 1e3
            none = speed if name == "none" else none
            rows.append(Projected(name, batch, padded, tokens, ms, speed, None if none is None else speed / none))
    return rows


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}", field="path") from error
    if not isinstance(data, dict):
        raise InvalidRequestError(f"{path} is no JSON object", field="path")
    return data
