"""`draftwood info`: what is installed, what the machine offers, which models would be served."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from draftwood import checkpoint
from draftwood.cli.console import out
from draftwood.cli.machine import num_cores, processor, versions
from draftwood.cli.memory import memory_facts
from draftwood.cli.options import build, settings
from draftwood.config import EMBEDDED, Config, DraftConfig, GatewayConfig, VerifyConfig, flag

SIZES = ("target", "draft", "random_weights", "dtype", "max_batch", "max_context", "page_size", "max_tree_budget")
EMBEDDED_FACTS = (
    "sprout, an 18.5M-parameter hybrid of the Qwen3.5 architecture trained on single-turn text of at most 640 tokens, "
    "and its 5.2M-parameter DFlash drafter: fluent but repetitive English, for demos, tests and honest figures"
)


@click.command()
@settings(VerifyConfig, only=SIZES)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(*, as_json: bool, **values: Any) -> None:
    """Show versions, processor features, models, the memory that they need, and default settings.

    \b
    Examples:
      draftwood info
      draftwood info --target ~/models/Qwen3-8B --draft ~/models/Qwen3-8B-DFlash-b16 --max-batch 4 --max-context 4096
      draftwood info --target ~/models/Qwen3-8B --draft none --json
    """
    facts = collect(build(VerifyConfig, values))
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for title, rows in facts.items():
        section = Table("", "", title=title, title_justify="left", show_header=False, box=None)
        for name, value in rows.items():
            section.add_row(name, value if isinstance(value, str) else json.dumps(value))
        out.print(section, markup=False)
        out.print()


def collect(config: VerifyConfig) -> dict[str, dict[str, Any]]:
    """All facts, by section."""
    names = {"target": config.target} | ({} if config.draft == "none" else {"draft": config.draft})
    models = {f"{kind} model": model_facts(checkpoint.resolve(name, setting=kind)) for kind, name in names.items()}
    facts: dict[str, dict[str, Any]] = {"versions": dict(versions()), "machine": machine_facts()}
    if EMBEDDED in names.values():
        facts["embedded pair"] = {"what": EMBEDDED_FACTS}
    facts |= models
    facts |= memory_facts(config)
    for defaults in (DraftConfig(), VerifyConfig(), GatewayConfig()):
        facts[f"defaults: {type(defaults).__name__.removesuffix('Config').lower()}"] = default_flags(defaults)
    return facts


def machine_facts() -> dict[str, Any]:
    """Processor, devices, and whether bfloat16 products are native."""
    import torch

    from draftwood.device.placement import multiplies_bfloat16

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    native = multiplies_bfloat16()
    return {
        "processor": processor(),
        "cores": num_cores(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "native bfloat16": native,
        "number format by default": "bfloat16" if devices or native else "float32",
        "GPUs": devices,
    }


def model_facts(directory: Path) -> dict[str, Any]:
    """Where a model is and its shape."""
    config = checkpoint.read_config(directory)
    text: dict[str, Any] = config.get("text_config") or config
    facts: dict[str, Any] = {"directory": str(directory), "model type": config.get("model_type", "unknown")}
    named = {
        "layers": "num_hidden_layers", "hidden size": "hidden_size", "vocabulary": "vocab_size",
        "longest context": "max_position_embeddings",
    }  # fmt: skip
    facts |= {name: text[key] for name, key in named.items() if key in text}
    if "layer_types" in text:
        facts["mixers"] = dict(Counter(text["layer_types"]))
    drafter = text.get("dflash_config", {})
    facts |= {"block size": text["block_size"]} if "block_size" in text else {}
    facts |= {"taps": drafter["target_layer_ids"]} if "target_layer_ids" in drafter else {}
    return facts


def default_flags(config: Config) -> dict[str, Any]:
    """Flags of a service with their defaults."""
    return {flag(spec.name): getattr(config, spec.name) for spec in dataclasses.fields(config)}
