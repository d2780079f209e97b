"""Configuration: one frozen dataclass per service, validated on construction, and the flags generated from its fields.

Every field carries its help text and its limits. Values that depend on the machine or the model stay 0 or "auto" here
and are resolved by the service that reads them, into values of its own; a config is never changed.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, get_args, get_type_hints

from draftwood.address import check_address
from draftwood.errors import ConfigError
from draftwood.ranges import check_range
from draftwood.tree import MAX_TREE_BUDGET, MAX_WIDTH

ALGORITHMS = ("none", "dflash", "ddtree")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
MAX_DRAFT_TIMEOUT_MS = 30_000  # half of what the health check gives a turn of the device loop, which waits for drafts
EMBEDDED = "embedded"
RANDOM_HELP = (
    "Whether the models' weights are drawn at random, for which their config.json is enough: to measure a shape before "
    "downloading it. Without a tokenizer.json the embedded model's stands in."
)
PORTS = (0, 65_535)
DRAIN_HELP = (
    "At a stop, how long requests that were accepted may go on; new ones are refused with a retry time meanwhile."
)


def setting(
    default: Any, help_text: str, choices: tuple[str, ...] | None = None, *, limits: tuple[float, float] | None = None
) -> Any:
    """A dataclass field with its help text and the values it takes: of strings those of `choices`, of numbers those
    from the first of `limits` to the second."""
    return field(default=default, metadata={"help": help_text, "choices": choices, "limits": limits})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of all: validation and flags."""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value, choices, limits = getattr(self, spec.name), spec.metadata["choices"], spec.metadata["limits"]
            if choices is not None and value not in choices:
                raise ConfigError(f"{flag(spec.name)} is {value!r}, not one of {', '.join(choices)}", field=spec.name)
            if limits is not None:
                check_range(flag(spec.name), value, *limits, field=spec.name, error=ConfigError)

    @classmethod
    def from_args(cls, args: Sequence[str], prog: str) -> Self:
        """Parses command-line flags; prints help or a usage error and exits as argparse does."""
        parser = argparse.ArgumentParser(
            prog=prog, description=(cls.__doc__ or "").split("\n")[0], formatter_class=argparse.RawTextHelpFormatter
        )
        add_flags(parser, cls)
        values = vars(parser.parse_args(args))
        try:
            return cls(**values)
        except ConfigError as error:
            parser.error(error.message)

    def to_args(self) -> list[str]:
        """The flags that rebuild this configuration, defaults left out."""
        args: list[str] = []
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if value == spec.default:
                continue
            if isinstance(value, bool):
                args.append(flag(spec.name) if value else flag("no_" + spec.name))
            else:
                args += [flag(spec.name), str(value)]
        return args


def flag(name: str) -> str:
    """Command-line spelling of a field."""
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, config: type[Config], skip: frozenset[str] = frozenset()) -> None:
    """One flag a field, with the field's help, default and type."""
    hints = get_type_hints(config)
    for spec in dataclasses.fields(config):
        if spec.name in skip:
            continue
        kind, text = hints[spec.name], f"{spec.metadata['help']} (default: {spec.default})"
        if kind is bool:
            parser.add_argument(
                flag(spec.name), action=argparse.BooleanOptionalAction, default=spec.default, help=spec.metadata["help"]
            )
        else:
            scalar = next((t for t in get_args(kind) if t is not type(None)), kind)
            choices = spec.metadata["choices"]
            parser.add_argument(flag(spec.name), type=scalar, default=spec.default, choices=choices, help=text)


@dataclass(frozen=True, kw_only=True)
class PeerConfig(Config):
    """How services, and commands that call them, trust each other: files in PEM format, and a shared token."""

    tls_cert: str = setting("", "File with the certificate that services show each other; turns TLS on for listening.")
    tls_key: str = setting("", "File with the certificate's private key.")
    tls_ca: str = setting("", "File with the authorities whose certificates are trusted; turns TLS on for calling.")
    token_file: str = setting(
        "", "File with the token that services ask each other for; of several lines all are taken, the first is sent."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_pair("tls_cert", "tls_key")

    def check_pair(self, name: str, other: str) -> None:
        """Raises ConfigError where one of two files is named without the other."""
        for given, missing in ((name, other), (other, name)):
            if getattr(self, given) and not getattr(self, missing):
                raise ConfigError(f"{flag(given)} {getattr(self, given)} needs {flag(missing)}", field=missing)


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(PeerConfig):
    """What the three services have in common."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    metrics_port: int = setting(
        0, "Port of the Prometheus endpoint, /metrics on the same address; 0 opens none.", limits=PORTS
    )
    otlp_endpoint: str = setting(
        "", "OpenTelemetry collector that traces go to, as http://HOST:4317 (OTLP over gRPC); empty sends none."
    )
    trace_file: str = setting(
        "", "File that finished spans are appended to, one JSON object per line; empty writes none."
    )
    trace_ratio: float = setting(
        1.0,
        "Part of the requests that is traced, from 0 to 1, where the caller's traceparent does not decide.",
        limits=(0.0, 1.0),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--otlp-endpoint is {self.otlp_endpoint!r}, not an http:// or https:// address", field="otlp_endpoint"
            )

    @property
    def is_traced(self) -> bool:
        """Whether spans go anywhere."""
        return bool(self.otlp_endpoint or self.trace_file)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ServiceConfig):
    """What the draft and verify services have in common."""

    target: str = setting(EMBEDDED, "Target model: a local directory, a hub id, or 'embedded'.")
    draft: str = setting(EMBEDDED, "Draft model: a local directory, a hub id, 'embedded', or 'none'.")
    random_weights: bool = setting(False, RANDOM_HELP)
    dtype: str = setting(
        "auto",
        "Number format of weights and activations; auto on a CPU is bfloat16 where the processor "
        "multiplies it natively, else float32.",
        DTYPES,
    )
    device: str = setting("auto", "Where the model runs.", DEVICES)
    threads: int = setting(0, "CPU threads of this process; 0 picks them.", limits=(0, 1024))
    max_batch: int = setting(8, "Sequences decoded together at most.", limits=(1, 1024))
    max_context: int = setting(
        0,
        "Longest sequence in tokens, prompt and answer together; 0 takes the model's own, at most 8192.",
        limits=(0, 1 << 20),
    )
    page_size: int = setting(64, "Tokens per KV page; a GPU is fastest with multiples of 64.", limits=(1, 1024))
    compile: bool = setting(True, "Whether steps are compiled; the first start takes longer, later ones use the cache.")
    draft_window: int = setting(
        0, "Tokens of context that the drafter sees; 0 takes what its checkpoint says.", limits=(0, 1 << 20)
    )
    tls_client_auth: bool = setting(False, "Whether callers must show a certificate that --tls-ca trusts.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tls_cert", "tls_ca") if self.tls_client_auth else ():
            if not getattr(self, name):
                raise ConfigError(f"--tls-client-auth needs {flag(name)}", field=name)


@dataclass(frozen=True, kw_only=True)
class DraftConfig(ModelConfig):
    """Draft service: runs the draft model and streams candidate token trees to a verify service."""

    port: int = setting(50061, "Port to listen on; 0 picks a free one.", limits=PORTS)
    block_size: int = setting(
        0, "Positions of a draft block, the root included; 0 takes the checkpoint's.", limits=(0, 256)
    )


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(ModelConfig):
    """Verify service: holds the target model, checks draft trees, commits accepted tokens."""

    port: int = setting(50051, "Port to listen on; 0 picks a free one.", limits=PORTS)
    drafter: str = setting("127.0.0.1:50061", "Address of the draft service; 'none' serves without drafts.")
    algorithm: str = setting(
        "ddtree",
        "How candidates are proposed, unless a request says otherwise: none (autoregressive), dflash (a "
        "chain), ddtree (a tree).",
        ALGORITHMS,
    )
    tree_budget: int = setting(
        0,
        "Nodes of a tree without the root; 0 picks the device's usual: 7 on a CPU, 31 on a GPU.",
    )
    max_tree_budget: int = setting(63, "Largest tree budget that a request may ask for.", limits=(1, MAX_TREE_BUDGET))
    tree_width_cap: int = setting(16, "Candidates per depth of the tree at most.", limits=(1, MAX_WIDTH))
    tree_spine: bool = setting(False, "Whether the whole likeliest chain goes into a tree first.")
    shadow_linear: bool = setting(
        False,
        "Whether requests with ddtree verify the chain and the tree together, commit only the chain, and report what "
        "the tree would have won.",
    )
    debug_metrics: bool = setting(False, "Whether each step is logged: nodes, depth, accepted length, stage times.")
    allow_hybrid_unsafe: bool = setting(
        False,
        "Serve recurrent layers that have no tree adapter, wrongly once a draft is rejected.",
    )
    max_queue: int = setting(64, "Requests that may wait; more are refused with a retry time.", limits=(0, 1 << 20))
    cache_tokens: int = setting(
        0,
        "Tokens that the KV pages hold for all sequences together; 0 takes max_batch times the longest sequence. With "
        "fewer, requests wait for pages, too.",
        limits=(0, 1 << 31),
    )
    prefill_tokens: int = setting(
        256,
        "Prompt tokens in one pass at most, over several prompts. Beside answers that are being decoded a pass has at "
        "most 64, and the passes together take two fifths of the steps' time, or more where many prompts wait.",
        limits=(1, 1 << 20),
    )
    draft_timeout_ms: int = setting(
        1000,
        "How long a step waits for the drafter before it goes on without a draft.",
        limits=(1, MAX_DRAFT_TIMEOUT_MS),
    )
    drain_timeout_s: float = setting(10.0, DRAIN_HELP, limits=(0, 86_400))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafter != "none":
            check_address("drafter", self.drafter)
        check_range("--tree-budget", self.tree_budget, 0, self.max_tree_budget, field="tree_budget", error=ConfigError)
        if 0 < self.cache_tokens < self.max_context:
            raise ConfigError(
                f"--cache-tokens is {self.cache_tokens}, less than the {self.max_context} of --max-context: "
                "the longest request would never fit",
                field="cache_tokens",
            )


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    """Gateway: OpenAI-compatible REST in front of a verify service."""

    port: int = setting(8000, "Port to listen on; 0 picks a free one.", limits=PORTS)
    verify: str = setting("127.0.0.1:50051", "Address of the verify service.")
    target: str = setting(
        EMBEDDED,
        "Target model, for its tokenizer and chat template: a directory, a hub id, or 'embedded'.",
    )
    random_weights: bool = setting(False, RANDOM_HELP)
    served_model_name: str = setting("", "Name in /v1/models and in requests; empty takes the target's own.")
    max_body_bytes: int = setting(16 << 20, "Largest request body.", limits=(1024, 1 << 30))
    request_timeout_s: float = setting(600.0, "Longest time for one request.", limits=(0.1, 86_400))
    https_cert: str = setting("", "File with the certificate that the API shows; turns HTTPS on.")
    https_key: str = setting("", "File with its private key.")
    api_key_file: str = setting("", "File with API keys, one per line; requests must carry one of them.")
    drain_timeout_s: float = setting(
        10.0,
        "At a stop, how long answers that are under way may go on; new connections are refused meanwhile.",
        limits=(0, 86_400),
    )
    keepalive_s: float = setting(
        15.0, "Seconds of silence after which a stream gets a comment line; 0 sends none.", limits=(0, 3600)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address("verify", self.verify)
        self.check_pair("https_cert", "https_key")
