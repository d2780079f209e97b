"""Supervision of the three services, with stand-ins for them."""

from __future__ import annotations

import asyncio
import socket

import pytest

from draftwood.cli.stack.launch import private_config, stack_config
from draftwood.cli.stack.process import ServiceDiedError
from draftwood.cli.stack.stack import Stack, StackConfig
from draftwood.errors import ConfigError
from tests.draftwood.cli.fake_services import FakeServices, is_alive

EVERYTHING = {"target": "embedded", "draft": "embedded"}


async def test_starts_and_stops_in_order(fakes: FakeServices) -> None:
    notices: list[tuple[str, str]] = []

    def notify(name: str, text: str) -> None:
        notices.append((name, text))

    async with Stack(private_config(EVERYTHING), environment=fakes.environment(), notify=notify) as stack:
        await stack.start()
        assert set(stack.pids) == {"draft", "verify", "gateway"}
        assert all(is_alive(pid) for pid in stack.pids.values())
        assert [note.split()[0] for note in fakes.notes()][-1] == "gateway"
    assert [note for note in fakes.notes() if note.endswith("stopped")] == [
        "gateway stopped",
        "verify_service stopped",
        "draft_service stopped",
    ]
    assert not any(is_alive(pid) for pid in fakes.started())
    assert ("gateway", f"ready on {stack.url}") in notices
    assert ("verify", f"ready on {stack.verify_address}") in notices


async def test_services_know_each_other(fakes: FakeServices) -> None:
    async with Stack(private_config(EVERYTHING), environment=fakes.environment()) as stack:
        await stack.start()
    arguments = {note.split()[0]: note for note in fakes.notes() if " started " in note}
    draft, verify = stack.config.draft, stack.config.verify
    assert draft is not None
    assert f"--port {draft.port}" in arguments["draft_service"]
    assert f"--drafter 127.0.0.1:{draft.port}" in arguments["verify_service"]
    assert f"--verify 127.0.0.1:{verify.port}" in arguments["gateway"]


async def test_without_a_drafter(fakes: FakeServices) -> None:
    async with Stack(private_config({"draft": "none"}), environment=fakes.environment()) as stack:
        await stack.start()
        assert set(stack.pids) == {"verify", "gateway"}
    arguments = next(note for note in fakes.notes() if note.startswith("verify_service started"))
    assert "--draft none" in arguments
    assert "--drafter none" in arguments


@pytest.mark.parametrize("name", ["draft_service", "verify_service", "gateway"])
async def test_a_service_that_refuses_to_start_stops_everything(fakes: FakeServices, name: str) -> None:
    stack = Stack(private_config(EVERYTHING), environment=fakes.environment(**{name: "refuse"}))
    async with stack:
        with pytest.raises(ServiceDiedError, match=r"exit code 2.*\n.*hidden size 64 differs"):
            await stack.start()
    assert not any(is_alive(pid) for pid in fakes.started())


async def test_a_service_that_never_gets_ready_is_given_up(fakes: FakeServices) -> None:
    base = private_config(EVERYTHING)
    config = StackConfig(draft=base.draft, verify=base.verify, gateway=base.gateway, start_timeout_s=0.5)
    async with Stack(config, environment=fakes.environment(verify_service="silent")) as stack:
        with pytest.raises(ServiceDiedError, match="verify service is not ready after"):
            await stack.start()
    assert not any(is_alive(pid) for pid in fakes.started())


@pytest.mark.parametrize("name", ["verify", "gateway"])
async def test_the_death_of_an_essential_service_is_reported(fakes: FakeServices, name: str) -> None:
    module = {"verify": "verify_service", "gateway": "gateway"}[name]
    config = private_config(EVERYTHING)
    async with Stack(config, environment=fakes.environment(**{module: "die"})) as stack:
        try:
            await stack.start()
            failure = await asyncio.wait_for(stack.supervise(), 10)
        except ServiceDiedError as error:  # it may die before the start is over
            failure = error
    assert failure.name == name
    assert "exit code 3" in failure.message
    assert "something broke" in failure.message


async def test_a_drafter_that_dies_is_started_again(fakes: FakeServices) -> None:
    again = asyncio.Event()
    ready = 0

    def notify(name: str, text: str) -> None:
        nonlocal ready
        ready += name == "draft" and text.startswith("ready")
        if ready == 2:
            again.set()

    environment = fakes.environment(draft_service="die on request")
    async with Stack(
        private_config(EVERYTHING), environment=environment, notify=notify, restart_delays_s=(0.05,)
    ) as stack:
        await stack.start()
        before = stack.pids
        supervision = asyncio.create_task(stack.supervise())
        (fakes.folder / "die").touch()
        await asyncio.wait_for(again.wait(), 10)
        after = stack.pids
        assert after["draft"] != before.get("draft")
        assert after["verify"] == before["verify"]
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)
    assert len([note for note in fakes.notes() if note.startswith("draft_service started")]) == 2


async def test_what_a_service_started_dies_with_it(fakes: FakeServices) -> None:
    async with Stack(private_config(EVERYTHING), environment=fakes.environment(verify_service="child")) as stack:
        await stack.start()
        assert len(fakes.started()) == 4
    assert not any(is_alive(pid) for pid in fakes.started())


async def test_a_service_that_ignores_the_stop_is_killed(fakes: FakeServices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.cli.stack.stack.STOP_GRACE_S", 0.2)
    async with Stack(private_config(EVERYTHING), environment=fakes.environment(gateway="stubborn")) as stack:
        await stack.start()
    assert not any(is_alive(pid) for pid in fakes.started())


@pytest.mark.parametrize("setting", ["port", "verify_port", "draft_port"])
def test_a_taken_port_is_refused_by_name(setting: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        ports = {"port": 0, "verify_port": 0, "draft_port": 0} | {setting: taken}
        with pytest.raises(ConfigError, match=f"--{setting.replace('_', '-')} {taken}: .*in use") as error:
            Stack(stack_config(EVERYTHING | ports))
    assert error.value.field == setting


def test_all_taken_ports_are_named_together() -> None:
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("127.0.0.1", 0))
            listener.listen()
        ports = {"port": first.getsockname()[1], "verify_port": second.getsockname()[1], "draft_port": 0}
        with pytest.raises(ConfigError, match=r"--verify-port .*; --port .*another `draftwood up` running\?"):
            Stack(stack_config(EVERYTHING | ports))


def test_each_service_has_a_metrics_port_of_its_own() -> None:
    config = private_config(EVERYTHING | {"metrics_port": 9464})
    assert config.draft is not None
    assert config.gateway is not None
    assert [part.metrics_port for part in (config.gateway, config.verify, config.draft)] == [9464, 9465, 9466]
    assert private_config(EVERYTHING | {"metrics_port": 0}).verify.metrics_port == 0


def test_drafter_threads_are_its_own() -> None:
    config = private_config(EVERYTHING | {"threads": 4, "draft_threads": 1})
    assert config.draft is not None
    assert (config.draft.threads, config.verify.threads) == (1, 4)
    assert private_config(EVERYTHING | {"threads": 4, "draft_threads": 0}).verify.threads == 4
