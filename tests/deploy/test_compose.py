"""The Compose files: valid by Compose's own schema, and what an operator counts on is in them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftwood.config import DraftConfig, GatewayConfig, VerifyConfig
from tests.deploy.compose import BASE, CPU, DEPLOY, ONE_GPU, TELEMETRY, load, variables_of

OURS = {"gateway": GatewayConfig, "verify": VerifyConfig, "draft": DraftConfig}
STACKS = {
    "base": (BASE,), "one GPU": (BASE, ONE_GPU), "CPU": (BASE, CPU), "CPU, telemetry": (BASE, CPU, TELEMETRY),
    "telemetry": (BASE, TELEMETRY), "one GPU, telemetry": (BASE, ONE_GPU, TELEMETRY),
    "override: one GPU": (ONE_GPU,), "override: CPU": (CPU,), "override: telemetry": (TELEMETRY,),
}  # fmt: skip


def devices(service: dict[str, Any]) -> list[list[str]]:
    reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    assert all(device["driver"] == "nvidia" and device["capabilities"] == ["gpu"] for device in reserved)
    return [device["device_ids"] for device in reserved]


def command(service: dict[str, Any]) -> list[str]:
    return [*service["entrypoint"], *service.get("command", [])]


def test_every_file_is_known() -> None:
    assert set(DEPLOY.glob("docker-compose*.yaml")) == {BASE, ONE_GPU, CPU, TELEMETRY}


def test_the_schema_holds(tmp_path: Path) -> None:
    """Files alone and merged; the schema knows neither `!reset` nor `!override`, so that it gets what they lead to."""
    for name, paths in STACKS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(load(*paths)))
    run = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    files = sorted(str(path) for path in tmp_path.glob("*.json"))
    result = subprocess.run([*run, *files], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(load(BASE) | {"services": {"gateway": {"restarts": "always"}}}))
    assert subprocess.run([*run, str(broken)], capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize(
    ("paths", "verify", "draft"),
    [((BASE,), [["0"]], [["1"]]), ((BASE, ONE_GPU), [["0"]], [["0"]]), ((BASE, CPU), [], [])],
    ids=["two GPUs", "one GPU", "CPU"],
)
def test_gpus(paths: tuple[Path, ...], verify: list[list[str]], draft: list[list[str]]) -> None:
    services = load(*paths)["services"]
    assert (devices(services["verify"]), devices(services["draft"])) == (verify, draft)
    assert devices(services["gateway"]) == []
    device = "cuda" if verify else "cpu"
    assert all(f"--device={device}" in command(services[name]) for name in ("verify", "draft"))
    image = f"draftwood:{'cuda' if verify else 'cpu'}"
    assert all(services[name]["image"] == image for name in OURS)
    assert all(services[name]["build"]["target"] == image.split(":")[1] for name in OURS)


def test_nobody_depends_on_the_drafter() -> None:
    services = load(BASE)["services"]
    assert services["gateway"]["depends_on"] == {"verify": {"condition": "service_started"}}
    assert "depends_on" not in services["verify"]
    assert "depends_on" not in services["draft"]


@pytest.mark.parametrize("name", OURS)
def test_each_service_looks_after_itself(name: str) -> None:
    service = load(BASE)["services"][name]
    assert service["init"] is True
    assert service["restart"] == "unless-stopped"
    test = service["healthcheck"]["test"]
    port = flags(service)["port"]
    scheme = "http://" if name == "gateway" else ""
    assert test == ["CMD", "draftwood", "check", f"{scheme}127.0.0.1:{port}"]
    assert service["healthcheck"]["start_period"] == "30m"
    assert int(service["stop_grace_period"].removesuffix("s")) >= 15
    assert flags(service)["metrics-port"] in service["expose"]
    assert name == "gateway" or service["shm_size"] == "1gb"


def flags(service: dict[str, Any]) -> dict[str, str]:
    return dict(part.removeprefix("--").split("=", 1) for part in command(service) if part.startswith("--"))


@pytest.mark.parametrize("paths", [(BASE,), (BASE, CPU)], ids=["GPU", "CPU"])
@pytest.mark.parametrize("name", OURS)
def test_commands_are_understood(name: str, paths: tuple[Path, ...]) -> None:
    service = load(*paths)["services"][name]
    assert command(service)[:2] == ["draftwood", name]
    config = OURS[name].from_args(command(service)[2:], name)
    assert config.host == "0.0.0.0"
    if isinstance(config, GatewayConfig):
        assert config.verify == "verify:50051"
    if isinstance(config, VerifyConfig):
        assert config.drafter == "draft:50061"


def test_models_are_mounted_where_they_are_read() -> None:
    services = load(BASE)["services"]
    for name in OURS:
        mounts = {mount["target"]: mount for mount in services[name]["volumes"] if mount["type"] == "bind"}
        models = {value for key, value in flags(services[name]).items() if key in ("target", "draft")}
        assert set(mounts) == models
        for mount in mounts.values():
            assert mount["read_only"] is True
            assert (DEPLOY / mount["source"] / "config.json").is_file()
    assert {"/models/target", "/models/draft", "/cache"} == {part["target"] for part in services["draft"]["volumes"]}


def test_only_the_gateway_is_reached_from_outside() -> None:
    whole = load(BASE)
    assert whole["networks"]["services"] == {"internal": True}
    published = {name: service["ports"] for name, service in whole["services"].items() if "ports" in service}
    assert published == {"gateway": ["127.0.0.1:8000:8000"]}
    assert {name: service["networks"] for name, service in whole["services"].items()} == {
        "gateway": ["services", "outside"], "verify": ["services"], "draft": ["services"],
    }  # fmt: skip


def test_every_variable_is_explained_with_its_default() -> None:
    lines = re.findall(r"^#(\w+)=(.*)$", (DEPLOY / "example.env").read_text(), re.MULTILINE)
    used = variables_of(BASE, ONE_GPU, CPU, TELEMETRY)
    assert {name for name, _ in lines} == set(used)
    assert {name: value for name, value in lines if name != "OTLP_ENDPOINT"} == {
        name: value for name, value in used.items() if name != "OTLP_ENDPOINT"
    }


def test_what_telemetry_mounts_is_there() -> None:
    services = load(TELEMETRY)["services"]
    mounts = [mount for service in services.values() for mount in service["volumes"] if mount["type"] == "bind"]
    sources = [mount["source"] for mount in mounts]
    assert len(sources) == 4
    assert [source for source in sources if not (DEPLOY / source).exists()] == []


def test_prometheus_and_the_collector_are_where_the_others_look() -> None:
    services = load(BASE, TELEMETRY)["services"]
    scraped: Any = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    targets = {t for job in scraped["scrape_configs"] for group in job["static_configs"] for t in group["targets"]}
    assert targets == {f"{name}:{flags(services[name])['metrics-port']}" for name in OURS}
    collector: Any = yaml.safe_load((DEPLOY / "collector" / "collector.yaml").read_text())
    port = collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].split(":")[1]
    assert f"#OTLP_ENDPOINT=http://collector:{port}\n" in (DEPLOY / "example.env").read_text()
    source = (DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text()
    assert f"http://prometheus:{services['prometheus']['expose'][0]}" in source
