"""Benchmark prompts: files of several shapes to texts, and texts to token ids with the target's chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers

import draftwood
from draftwood.errors import ConfigError, InvalidRequestError

SHIPPED = Path(draftwood.__file__).parent / "prompts" / "questions.jsonl"
KEYS = ("prompt", "text", "question", "turns")


@dataclass(frozen=True)
class PromptSet:
    """Texts with the name of the file they came from and a hash over them."""

    name: str
    texts: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over the texts, so that two results can be compared."""
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()

    def first(self, limit: int | None) -> PromptSet:
        """The first `limit` texts."""
        return self if limit is None else PromptSet(self.name, self.texts[:limit])


def load(path: Path | None) -> PromptSet:
    """Reads JSON lines with one of KEYS, of `turns` the first, or plain text with one prompt per line.

    None reads the shipped set. Raises InvalidRequestError naming file and line.
    """
    path = SHIPPED if path is None else path
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}", field="prompts") from error
    filled = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if not filled:
        raise InvalidRequestError(f"{path} has no prompts", field="prompts")
    if not filled[0][1].startswith("{"):
        return PromptSet(path.name, tuple(line for _, line in filled))
    return PromptSet(path.name, tuple(_text(line, f"{path}:{number}") for number, line in filled))


def _text(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"{where}: not JSON ({error})", field="prompts") from error
    value: Any = next((record[key] for key in KEYS if isinstance(record, dict) and key in record), None)
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequestError(f"{where}: no text under {', '.join(KEYS)}", field="prompts")
    return value


class PromptEncoder:
    """Token ids of single questions, as a target directory's tokenizer and chat template make them."""

    def __init__(self, directory: Path) -> None:
        definition = directory / "tokenizer.json"
        if not definition.is_file():
            raise ConfigError(f"--target {directory}: the directory has no tokenizer.json", field="target")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(definition))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _read_settings(directory)
        template = _template(directory, settings)
        self._template = None if template is None else _compile(template)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self._names = {name: _content(settings[name]) for name in names if settings.get(name)}

    def encode(self, text: str) -> list[int]:
        """Ids of the rendered conversation, ready for the answer; of the bare text where there is no template."""
        if self._template is None:
            return self._tokenizer.encode(text).ids
        messages = [{"role": "user", "content": text}]
        rendered = self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        return self._tokenizer.encode(rendered, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each."""
        return [self.encode(text) for text in texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)


def _read_settings(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _template(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several named ones
        found = next((entry["template"] for entry in found if entry.get("name") == "default"), None)
    return found


def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise  # pyright: ignore[reportArgumentType]
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ConfigError(f"--target: its chat template cannot be compiled: {error}", field="target") from error


def _raise(message: str) -> None:
    raise InvalidRequestError(f"the chat template refuses the prompt: {message}", field="prompts")


def _content(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)
