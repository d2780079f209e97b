"""The target's chat template: conversations to text, in the sandbox and with the functions that transformers gives it.

Users' strings cannot smuggle in special tokens: a mark, a character that occurs nowhere else, is put into every special
token that a user's string spells and beside every part of one at its ends. Templates see the strings otherwise as they
are, so that trimming and searching work, and `Tokenizer.encode_marked` takes the marks out again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftwood.errors import InvalidRequestError

Message = Mapping[str, Any]

MARKS = [*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xFFFFE)]  # noncharacters, then a private plane


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it only holds its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template; `variables` are the special tokens by name, `specials` all that must not be smuggled in."""

    def __init__(self, source: str, variables: Mapping[str, str], specials: Sequence[str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        functions = cast("dict[str, Any]", environment.globals)
        functions |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._template = environment.from_string(source)
        self._source = source
        self._variables = dict(variables)
        self._specials = sorted(filter(None, specials), key=len, reverse=True)

    def render(
        self, messages: Sequence[Message], options: Mapping[str, Any], *, continue_final: bool = False
    ) -> tuple[str, str]:
        """The conversation as text, and the mark that keeps users' strings apart.

        With `continue_final` the text ends where the last message does, for the model to go on with it. Raises
        InvalidRequestError if the template refuses the conversation.
        """
        mark = self._mark(json.dumps([*messages, options], ensure_ascii=False))
        marked: list[Any] = self._marked([*messages], mark)
        variables = self._variables | self._marked(dict(options), mark)
        variables["add_generation_prompt"] = variables.get("add_generation_prompt", True) and not continue_final
        try:
            text = self._template.render(messages=marked, tools=None, documents=None, **variables)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidRequestError(f"messages: the chat template refuses them: {error}", field="messages") from error
        if not continue_final:
            return text, mark
        final = str(marked[-1]["content"]).strip()
        start = text.rfind(final)
        if start < 0 or not final:
            raise InvalidRequestError("messages: the chat template leaves the last one out", field="messages")
        return text[: start + len(final)], mark

    def _mark(self, taken: str) -> str:
        return next(mark for mark in map(chr, MARKS) if mark not in taken and mark not in self._source)

    def _marked(self, value: Any, mark: str) -> Any:
        """The value with marks in all strings below it."""
        if isinstance(value, str):
            return self._mark_text(value, mark)
        if isinstance(value, dict):
            entries = cast("dict[str, Any]", value)
            return {self._mark_text(key, mark): self._marked(entry, mark) for key, entry in entries.items()}
        if isinstance(value, list):
            return [self._marked(entry, mark) for entry in cast("list[Any]", value)]
        return value

    def _mark_text(self, text: str, mark: str) -> str:
        """Marks whole special tokens after their first character, and parts of one at either end of the text."""
        begins = any(text.startswith(special[i:]) for special in self._specials for i in range(1, len(special)))
        ends = any(text.endswith(special[:i]) for special in self._specials for i in range(1, len(special)))
        for special in self._specials:
            text = text.replace(special, special[0] + mark + special[1:])
        return (mark if begins else "") + text + (mark if ends else "")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def read_source(directory: Path) -> str | None:
    """The template of a model's directory: chat_template.jinja, or `chat_template` of tokenizer_config.json."""
    path, settings_path = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if not settings_path.is_file():
        return None
    found: Any = json.loads(settings_path.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(found, list):  # several, by name
        templates = cast("list[dict[str, str]]", found)
        return next((entry["template"] for entry in templates if entry["name"] == "default"), None)
    return found
