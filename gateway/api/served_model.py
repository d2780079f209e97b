"""The model as clients see it: its name, tokenizer, chat template and sampling defaults, read from its directory."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jinja2

from draftwood import checkpoint
from draftwood.config import GatewayConfig
from draftwood.errors import ConfigError, ModelMismatchError, ModelNotFoundError
from gateway.api.refusal import show
from gateway.generation.verify_client import Target
from gateway.text.chat_template import ChatTemplate, read_source
from gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What absent sampling fields mean: the model's generation_config where it samples, else OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything about the model that does not come from the verify service."""

    name: str
    created: int
    tokenizer: Tokenizer
    tokenizer_hash: str
    template: ChatTemplate | None
    defaults: SamplingDefaults

    @classmethod
    def load(cls, config: GatewayConfig) -> Self:
        """Reads the files of `--target`. Raises ConfigError."""
        directory = checkpoint.resolve(config.target, setting="target")
        texts = checkpoint.tokenizer_directory(directory, random_weights=config.random_weights)
        tokenizer = Tokenizer.from_directory(texts)
        source = read_source(texts)
        try:
            template = None
            if source is not None:
                template = ChatTemplate(source, tokenizer.names, list(tokenizer.special_contents.values()))
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"--target {config.target}: the chat template is wrong: {error}", field="target"
            ) from error
        return cls(
            name=config.served_model_name or checkpoint.model_id(config.target, directory),
            created=int(time.time()),
            tokenizer=tokenizer,
            tokenizer_hash=checkpoint.tokenizer_hash(texts),
            template=template,
            defaults=read_defaults(directory),
        )

    def check_name(self, name: str | None) -> None:
        """Raises ModelNotFoundError unless the request is for this model; no name means this one."""
        if name is not None and name != self.name:
            raise ModelNotFoundError(
                f"The model {show(name)} does not exist; this server has {show(self.name)}", field="model"
            )

    def check_target(self, target: Target) -> None:
        """Raises ModelMismatchError if the verify service reads token ids differently."""
        if target.tokenizer_hash and target.tokenizer_hash != self.tokenizer_hash:
            raise ModelMismatchError(
                f"the gateway's tokenizer has the hash {self.tokenizer_hash}, the verify service's "
                f"({target.model_id}) {target.tokenizer_hash}; start both with the same --target"
            )

    def fingerprint(self, target: Target) -> str:
        """Changes with what decides the answers: the model and the version that serves it."""
        text = f"{target.model_id}\n{target.version}\n{target.tokenizer_hash}"
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_object(self, target: Target | None) -> dict[str, Any]:
        """The entry of /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "draftwood",
            "max_model_len": target.max_context if target is not None else None,
        }


def read_defaults(directory: Path) -> SamplingDefaults:
    """The model's generation_config where it says that answers are sampled; OpenAI's defaults elsewhere."""
    path = directory / "generation_config.json"
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not settings.get("do_sample"):
        return SamplingDefaults()

    def given(name: str, default: float) -> float:
        value = settings.get(name)
        return default if value is None else value

    return SamplingDefaults(float(given("temperature", 1.0)), float(given("top_p", 1.0)), int(given("top_k", 0)))
