"""Benchmark prompts: file shapes, and encoding against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.run import prompts
from bench.run.prompts import PromptEncoder, load
from draftwood.checkpoint import EMBEDDED_TARGET
from draftwood.errors import ConfigError, InvalidRequestError


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('{"prompt": "a"}\n\n{"prompt": "b", "id": 3}\n', ("a", "b")),
        ('{"text": "a"}\n{"question": "b", "answer": "c"}', ("a", "b")),
        ('{"turns": ["first", "second"]}', ("first",)),
        ("plain one\n\n  plain two  \n", ("plain one", "plain two")),
    ],
)
def test_file_shapes(tmp_path: Path, content: str, texts: tuple[str, ...]) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(content)
    assert load(path).texts == texts
    assert load(path).name == "some.jsonl"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a"}\n{"prompt"', r"bad\.jsonl:2: not JSON"),
        ('{"prompt": "a"}\n\n{"answer": "b"}', r"bad\.jsonl:3: no text under prompt, text, question, turns"),
        ('{"prompt": 5}', r"bad\.jsonl:1: no text"),
        ('{"turns": []}', r"bad\.jsonl:1: no text"),
        ('{"prompt": " "}', r"bad\.jsonl:1: no text"),
        ('{"prompt": "a"}\n["b"]', r"bad\.jsonl:2: no text"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match=message):
        load(path)


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"none\.jsonl cannot be read"):
        load(tmp_path / "none.jsonl")
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequestError, match=r"x\.bin cannot be read"):
        load(tmp_path / "x.bin")


def test_the_shipped_set() -> None:
    shipped = load(None)
    assert shipped.name == "questions.jsonl"
    assert len(shipped.texts) == len(set(shipped.texts)) >= 20
    assert shipped.first(3).texts == shipped.texts[:3]
    assert shipped.first(None) == shipped
    assert shipped.digest != shipped.first(3).digest


def test_encoding_is_that_of_transformers() -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    encoder = PromptEncoder(EMBEDDED_TARGET)
    for text in (*load(None).texts, "Ünïcödé 你好", "a\nb\n"):
        messages = [{"role": "user", "content": text}]
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert encoder.encode(text) == expected
    assert encoder.decode(encoder.encode("hello there")).count("hello there") == 1


def test_templates_in_the_tokenizers_settings(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((EMBEDDED_TARGET / "tokenizer.json").read_bytes())
    bare = PromptEncoder(tmp_path)
    plain = bare.encode("hello")
    assert bare.decode(plain) == "hello"
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = {"bos_token": {"content": "!"}, "chat_template": [{"name": "default", "template": template}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    encoder = PromptEncoder(tmp_path)
    assert encoder.decode(encoder.encode("hello")) == "!hello"


def test_templates_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        PromptEncoder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((EMBEDDED_TARGET / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="cannot be compiled"):
        PromptEncoder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(InvalidRequestError, match="refuses the prompt: no"):
        PromptEncoder(tmp_path).encode("x")


def test_the_shipped_file_is_where_the_wheel_takes_it_from() -> None:
    assert prompts.SHIPPED.relative_to(Path(prompts.draftwood.__file__).parent) == Path("prompts/questions.jsonl")
