"""Where models are: names to directories, tokenizer hashes, single tensors out of sharded safetensors files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from draftwood.config import EMBEDDED
from draftwood.errors import ConfigError, UnsupportedModelError

MODELS = Path(__file__).parent / "models"
EMBEDDED_TARGET = MODELS / "sprout"
EMBEDDED_DRAFT = MODELS / "sprout-DFlash-b16"


def resolve(name: str, *, setting: str) -> Path:
    """The local directory of a model given as a directory, a hub id or 'embedded'.

    `setting` is the flag the name came from. Raises ConfigError naming it, the value, and the embedded fallback.
    """
    if name == EMBEDDED:
        return EMBEDDED_DRAFT if setting == "draft" else EMBEDDED_TARGET
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"--{setting} {name}: the directory has no config.json", field=setting)
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ConfigError(f"--{setting} {name}: no such directory, and not a hub id (owner/name)", field=setting)
    import huggingface_hub

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # its own, its transport's, the disk's
        raise ConfigError(
            f"--{setting} {name}: no such directory; {_hub_trouble(error)}. "
            "Give a local directory, or leave the flag out for the embedded model",
            field=setting,
        ) from error


def _hub_trouble(error: Exception) -> str:
    """What was tried, and how it ended."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    match error:
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            why = "HF_HUB_OFFLINE forbids to ask the hub" if constants.HF_HUB_OFFLINE else f"{hub} cannot be reached"
            return f"it is not in the cache {constants.HF_HUB_CACHE}, and {why}"
        case errors.HFValidationError():
            return "and it is no hub id (owner/name)"
        case errors.GatedRepoError():
            return f"{hub} gives it only to those whose HF_TOKEN was granted access"
        case errors.RepositoryNotFoundError():
            return f"{hub} has no model of this name for you (HF_TOKEN)"
        case _:
            first = (str(error) or type(error).__name__).splitlines()[0]
            return f"{hub} does not deliver it: {first.rstrip('.')}"


def model_id(name: str, directory: Path) -> str:
    """How a model is called on the wire: its hub id, or its directory's name."""
    return name if not Path(name).is_dir() and name != EMBEDDED else directory.resolve().name


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}", field="config.json") from error
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{path} holds no JSON object", field="config.json")
    return cast("dict[str, Any]", config)


def default_target_layer_ids(num_draft_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Target layers that a DFlash checkpoint reads where it does not say: the middle one for one draft layer, else
    evenly from layer 1 to the third last."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


def tokenizer_hash(directory: Path) -> str:
    """SHA-256 of tokenizer.json, hexadecimal; empty where there is none."""
    path = directory / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def tokenizer_directory(directory: Path, *, random_weights: bool) -> Path:
    """Where a model's tokenizer and chat template are. A shape with random weights may lack them, and the embedded
    model's stand in: text goes in as text does, and of the answer only ids of its vocabulary can be read."""
    return EMBEDDED_TARGET if random_weights and not (directory / "tokenizer.json").is_file() else directory


def tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name to safetensors file, for single-file and sharded checkpoints."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    from safetensors import safe_open

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UnsupportedModelError(f"{directory} has no safetensors file", field="model.safetensors")
    names: dict[str, Path] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            names.update(dict.fromkeys(tensors.keys(), file))
    return names


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name to shape, from the files' headers alone."""
    headers = {file: _header(file) for file in set(tensor_files(directory).values())}
    return {name: tuple(headers[file][name]["shape"]) for name, file in tensor_files(directory).items()}


def load_tensors(directory: Path, names: Iterable[str]) -> dict[str, Any]:
    """Single torch tensors of a checkpoint as they are stored; the rest of it is not read."""
    from safetensors import safe_open

    files, by_file = tensor_files(directory), dict[Path, list[str]]()
    for name in names:
        if name not in files:
            raise UnsupportedModelError(f"{directory} lacks the tensor {name}", field=name)
        by_file.setdefault(files[name], []).append(name)
    loaded: dict[str, Any] = {}
    for file, wanted in by_file.items():
        with safe_open(file, "pt") as tensors:
            loaded.update((name, tensors.get_tensor(name)) for name in wanted)
    return loaded


def projection_checksum(directory: Path) -> str:
    """SHA-256 over a drafter's fc.weight and then hidden_norm.weight, as stored, hexadecimal."""
    files, digest = tensor_files(directory), hashlib.sha256()
    for name in ("fc.weight", "hidden_norm.weight"):
        stored = next((n for n in (name, f"model.{name}") if n in files), None)
        if stored is None:
            raise UnsupportedModelError(f"{directory} lacks the tensor {name}", field=name)
        begin, end = _header(files[stored])[stored]["data_offsets"]
        with files[stored].open("rb") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little") + begin)
            for offset in range(begin, end, 1 << 20):
                digest.update(file.read(min(1 << 20, end - offset)))
    return digest.hexdigest()


def _header(file: Path) -> dict[str, Any]:
    """Header of a safetensors file: a length in eight bytes, then JSON with dtype, shape and offsets of each tensor."""
    try:
        with file.open("rb") as data:
            return json.loads(data.read(int.from_bytes(data.read(8), "little")))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{file} cannot be read: {error}", field=file.name) from error
