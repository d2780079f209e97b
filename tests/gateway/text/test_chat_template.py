"""Conversations to ids: as transformers does it for ordinary text, and no special tokens out of users' strings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood import checkpoint
from draftwood.config import GatewayConfig
from draftwood.errors import InvalidRequestError
from gateway.api.served_model import ServedModel
from gateway.text.chat_template import ChatTemplate, read_source
from gateway.text.tokenizer import Tokenizer
from tests.gateway.text.test_detokenizer import PIECES

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
SPROUT = ServedModel.load(GatewayConfig())
QWEN_LIKE = """
{%- for m in messages %}{% if m.role == "tool" %}{{ '<|im_start|>user\n<tool_response>\n' + m.content | trim }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim }}{% endif %}<|im_end|>
{% if m.role == "stop" %}{% break %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}{% generation %}<|im_start|>assistant
{% endgeneration %}{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"""


def ids_of(template: ChatTemplate, tokenizer: Tokenizer, messages: list[dict[str, str]], **options: Any) -> list[int]:
    text, mark = template.render(messages, options)
    return tokenizer.encode_marked(text, mark)


def template_for(source: str, tokenizer: Tokenizer = SPROUT.tokenizer) -> ChatTemplate:
    return ChatTemplate(source, tokenizer.names, list(tokenizer.special_contents.values()))


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(checkpoint.EMBEDDED_TARGET)


CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Tell me a story."}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "naïve 🦊\n\n  def f():\n\treturn '<'"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b <| c"}, {"role": "user", "content": ""}],
    [{"role": "user", "content": "x < y |> z <|im_"}, {"role": "assistant", "content": "|> and >"}],
]


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
@pytest.mark.parametrize("source", [None, QWEN_LIKE], ids=["own", "qwen"])
def test_ids_equal_transformers(reference: Any, conversation: list[dict[str, str]], source: str | None) -> None:
    template = SPROUT.template if source is None else template_for(source)
    assert template is not None
    expected = reference.apply_chat_template(
        conversation, add_generation_prompt=True, tokenize=True, return_dict=False, chat_template=source
    )
    assert ids_of(template, SPROUT.tokenizer, conversation) == expected


@given(
    st.lists(st.one_of(st.text(max_size=8), st.sampled_from([*SPECIALS, "<|", "<|im_", "|>", ">", "<"])), max_size=6)
)
def test_users_spell_no_special_tokens(parts: list[str]) -> None:
    """The template's special tokens are there, no others, and the text is what was said."""
    content = "".join(parts)
    template, tokenizer = SPROUT.template, SPROUT.tokenizer
    assert template is not None
    ids = ids_of(template, tokenizer, [{"role": "user", "content": content}, {"role": "assistant", "content": content}])
    assert [i for i in ids if i in tokenizer.special_contents] == [1, 2, 1, 2, 1]
    assert tokenizer.decode(ids) == f"user\n{content}\nassistant\n{content}\nassistant\n"


def test_special_text_alone_is_encoded_as_text() -> None:
    template, tokenizer = SPROUT.template, SPROUT.tokenizer
    assert template is not None
    ids = ids_of(template, tokenizer, [{"role": "user", "content": "<|im_end|>"}])
    literal = tokenizer._encode_literal("user\n<|im_end|>")  # pyright: ignore[reportPrivateUsage]
    assert ids[: len(literal) + 2] == [1, *literal, 2]


def test_neighbours_join_to_no_special_token() -> None:
    template = template_for("{% for m in messages %}{{ m.role }}{{ m.name }}{{ m.content }}{% endfor %}<|im_end|>")
    ids = ids_of(template, SPROUT.tokenizer, [{"role": "user", "name": "<|im_", "content": "start|>"}])
    assert [i for i in ids if i in SPROUT.tokenizer.special_contents] == [2]


def test_options_cannot_smuggle_either() -> None:
    template = template_for("{{ style }}{{ more | tojson }}<|im_end|>")
    options: Any = {"style": "<|im_end|>", "more": {"<|mask|>": ["<|im_start|>"]}}
    ids = ids_of(template, SPROUT.tokenizer, [], **options)
    assert [i for i in ids if i in SPROUT.tokenizer.special_contents] == [2]
    assert SPROUT.tokenizer.decode(ids) == '<|im_end|>{"<|mask|>": ["<|im_start|>"]}'


def test_start_token_is_not_doubled() -> None:
    """Field bug 12: a template that emits the start token, a tokenizer that adds one."""
    template = template_for("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", PIECES)
    bos = PIECES.bos_id
    assert bos == 1
    ids = ids_of(template, PIECES, [{"role": "user", "content": "ab <s>"}])
    assert ids[0] == bos
    assert ids.count(bos) == 1
    for text in ("ab", "<s>ab"):
        ids = PIECES.encode(text, add_special_tokens=True)
        assert ids[0] == bos
        assert ids.count(bos) == 1


def test_template_refusals_are_bad_requests() -> None:
    for source in (
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 + 'a' }}",
    ):
        with pytest.raises(InvalidRequestError) as caught:
            template_for(source).render([{"role": "user", "content": "x"}], {})
        assert caught.value.field == "messages"


def test_functions_of_transformers() -> None:
    template = template_for("{{ strftime_now('%Y') | length }}{{ {'ä': 1} | tojson }}")
    assert template.render([], {})[0] == '4{"ä": 1}'


def test_where_templates_come_from(tmp_path: Path) -> None:
    assert read_source(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "one"}))
    assert read_source(tmp_path) == "one"
    settings.write_text(json.dumps({"chat_template": [{"name": "tool_use", "template": "a"}]}))
    assert read_source(tmp_path) is None
    settings.write_text(json.dumps({"chat_template": [{"name": "default", "template": "b"}]}))
    assert read_source(tmp_path) == "b"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_source(tmp_path) == "file"
