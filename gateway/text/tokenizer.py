"""The target's tokenizer, through the `tokenizers` library: ids, bytes of single tokens, special tokens.

Recognising special tokens in text is a property of a tokenizer object there, so two are kept: one that recognises them,
for what templates and completion prompts say, and one that reads them as text, for what users say in a chat.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from draftwood.errors import ConfigError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _byte_table() -> dict[str, int]:
    """Characters that stand for bytes in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """Immutable and safe to use from several threads."""

    def __init__(self, definition: str, settings: dict[str, Any]) -> None:
        self._recognising = tokenizers.Tokenizer.from_str(definition)
        self._literal = tokenizers.Tokenizer.from_str(definition)
        self._literal.encode_special_tokens = True
        for tokenizer in (self._recognising, self._literal):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        added = self._recognising.get_added_tokens_decoder()
        self.special_contents = {token_id: str(token.content) for token_id, token in added.items() if token.special}
        self.names = {name: _content(settings[name]) for name in SPECIAL_NAMES if settings.get(name)}
        bos = self.names.get("bos_token")
        self.bos_id: int | None = self._recognising.token_to_id(bos) if bos is not None else None
        decoder: dict[str, Any] = json.loads(definition).get("decoder") or {}
        self.is_byte_level = bool(decoder.get("type") == "ByteLevel")
        self._byte_of = _byte_table()
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Reads tokenizer.json and, where there is one, tokenizer_config.json."""
        path, settings_path = directory / "tokenizer.json", directory / "tokenizer_config.json"
        if not path.is_file():
            raise ConfigError(f"--target {directory}: the directory has no tokenizer.json", field="target")
        settings: dict[str, Any] = (
            json.loads(settings_path.read_text(encoding="utf-8")) if settings_path.is_file() else {}
        )
        return cls(path.read_text(encoding="utf-8"), settings)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of text in which special tokens count as such. A start token is not put before one already there."""
        ids: list[int] = self._recognising.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            return ids[1:]
        return ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Ids of text in which `mark`, a character, was put into or beside what is not to become a special token.

        The tokenizer's own rules find the special tokens; the marks keep it from finding those of the user. What lies
        between is encoded without marks by the tokenizer that knows no special tokens, each part by itself, as the
        library does within one call.
        """
        if mark not in text:
            return self.encode(text)
        ids: list[int] = []
        found = self._recognising.encode(text, add_special_tokens=False)
        end_of_last = 0
        for token_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            if text[start:end].strip() != self.special_contents.get(token_id):
                continue
            ids += self._encode_literal(text[end_of_last:start].replace(mark, ""))
            ids.append(token_id)
            end_of_last = end
        return ids + self._encode_literal(text[end_of_last:].replace(mark, ""))

    def _encode_literal(self, text: str) -> list[int]:
        return self._literal.encode(text, add_special_tokens=False).ids if text else []

    def decode(self, token_ids: list[int]) -> str:
        """Text without special tokens; bytes that are no character become U+FFFD."""
        return self._recognising.decode(token_ids, skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text, special or not; exact for byte-level vocabularies."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def _read_bytes(self, token_id: int) -> bytes:
        piece = self._recognising.id_to_token(token_id)
        if piece is None:
            return b""
        if self.is_byte_level:
            if all(char in self._byte_of for char in piece):
                return bytes(self._byte_of[char] for char in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    def token_text(self, token_id: int) -> str:
        """A token by itself, for people: bytes that are no character are written as \\xNN."""
        return self.token_bytes(token_id).decode("utf-8", errors="backslashreplace")


def _content(value: Any) -> str:
    """A special token as tokenizer_config.json gives it: a string, or an object with its content."""
    return value if isinstance(value, str) else str(value["content"])
