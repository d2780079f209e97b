"""The three services as one: started in order, supervised, stopped in order.

The draft service is optional at run time: when it dies it is started again with back-off and the others go on. When the
verify service or the gateway dies, nothing is left to serve with, and `supervise` returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from draftwood.cli.stack.environment import service_environment
from draftwood.cli.stack.ports import check_free, free_port, join
from draftwood.cli.stack.process import STOP_GRACE_S, LineSink, ServiceDiedError, ServiceProcess
from draftwood.config import DraftConfig, GatewayConfig, VerifyConfig

NO_DRAFTER = "none"
RESTART_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
STEADY_S = 60.0  # a drafter that ran this long is restarted without the delays that earlier deaths earned

Notify = Callable[[str, str], None]  # service name, what happened to it


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Settings of the three services. Without `draft` nothing is drafted; without `gateway` there is only gRPC."""

    draft: DraftConfig | None
    verify: VerifyConfig
    gateway: GatewayConfig | None
    start_timeout_s: float = 1800.0  # the first start compiles, and a large model takes minutes to load

    def with_ports(self) -> StackConfig:
        """A copy whose ports are all picked and whose services know each other. Raises ConfigError for taken ports."""
        wanted = {"draft_port": self.draft, "verify_port": self.verify, "port": self.gateway}
        check_free((config.host, config.port, name) for name, config in wanted.items() if config is not None)
        draft = None if self.draft is None else replace(self.draft, port=_pick(self.draft))
        verify = replace(
            self.verify,
            port=_pick(self.verify),
            drafter=NO_DRAFTER if draft is None else join(draft.host, draft.port),
            draft=self.verify.draft if draft is not None else NO_DRAFTER,
        )
        gateway = self.gateway
        if gateway is not None:
            gateway = replace(gateway, port=_pick(gateway), verify=join(verify.host, verify.port))
        return replace(self, draft=draft, verify=verify, gateway=gateway)


def _pick(config: DraftConfig | VerifyConfig | GatewayConfig) -> int:
    return config.port or free_port(config.host)


class Stack:
    """Running services. An async context manager: leaving it stops what was started.

    async with Stack(config) as stack:
        await stack.start()
        ... stack.url, stack.verify_address
        failure = await stack.supervise()
    """

    def __init__(
        self,
        config: StackConfig,
        *,
        environment: Mapping[str, str] | None = None,
        on_line: LineSink | None = None,
        notify: Notify | None = None,
        restart_delays_s: Sequence[float] = RESTART_DELAYS_S,
    ) -> None:
        self.config = config.with_ports()
        self._notify: Notify = notify or (lambda _name, _text: None)
        self._restart_delays_s = restart_delays_s
        configs = {"draft": self.config.draft, "verify": self.config.verify, "gateway": self.config.gateway}
        modules = {"draft": "draft_service", "verify": "verify_service", "gateway": "gateway"}
        self._services = {
            name: ServiceProcess(
                name,
                [modules[name], *config.to_args()],
                service_environment(modules[name]) if environment is None else environment,
                on_line,
            )
            for name, config in configs.items()
            if config is not None
        }

    @property
    def names(self) -> list[str]:
        """Its services, in the order in which they are started."""
        return list(self._services)

    @property
    def verify_address(self) -> str:
        """host:port of the verify service."""
        return join(self.config.verify.host, self.config.verify.port)

    @property
    def url(self) -> str:
        """Base address of the REST API. The stack must have a gateway."""
        assert self.config.gateway is not None, "a stack without a gateway"
        scheme = "https" if self.config.gateway.https_cert else "http"
        return f"{scheme}://{join(self.config.gateway.host, self.config.gateway.port)}/v1"

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of what runs, by service."""
        return {name: service.pid for name, service in self._services.items() if service.pid is not None}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        try:
            await self.stop()
        finally:
            self.kill()  # what a second signal left: services have children of their own

    async def start(self) -> None:
        """Starts drafter and target side by side, then the gateway. Raises ServiceDiedError; call `stop` then too."""
        await self._start_together(name for name in ("draft", "verify") if name in self._services)
        if "gateway" in self._services:
            await self._start_together(["gateway"])

    async def _start_together(self, names: Iterable[str]) -> None:
        names = list(names)
        for name in names:
            self._notify(name, "starting")
            await self._services[name].start()
        waits = [asyncio.create_task(self._until_ready(name)) for name in names]
        deaths = [asyncio.create_task(self._until_dead(s)) for s in self._services.values() if s.is_running]
        try:
            pending = set(waits)
            while pending:
                done, _ = await asyncio.wait((*pending, *deaths), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what went wrong
                pending -= done
        finally:
            for task in (*waits, *deaths):
                task.cancel()
            await asyncio.gather(*waits, *deaths, return_exceptions=True)

    async def _until_ready(self, name: str) -> None:
        address = await self._services[name].ready(self.config.start_timeout_s)
        self._notify(name, f"ready on {self.url if name == 'gateway' else address}")

    async def _until_dead(self, service: ServiceProcess) -> None:
        await service.exited()
        raise service.death()

    async def supervise(self) -> ServiceDiedError:
        """Keeps the drafter alive until the verify service or the gateway ends; that end."""
        keeper = asyncio.create_task(self._keep_drafter()) if "draft" in self._services else None
        essential = [service for name, service in self._services.items() if name != "draft"]
        exits = {asyncio.create_task(service.exited()): service for service in essential}
        try:
            waited = [*exits, keeper] if keeper is not None else [*exits]
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if keeper is not None and keeper in done:
                await keeper  # it runs for ever, so this raises
            return next(service.death() for task, service in exits.items() if task in done)
        finally:
            tasks = [*exits] if keeper is None else [*exits, keeper]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _keep_drafter(self) -> None:
        drafter, deaths = self._services["draft"], 0
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            await drafter.exited()
            deaths = 0 if loop.time() - started > STEADY_S else deaths
            delay = self._restart_delays_s[min(deaths, len(self._restart_delays_s) - 1)]
            deaths += 1
            self._notify("draft", f"{drafter.death().message}\nstarting it again in {delay:g} s; the others go on")
            await asyncio.sleep(delay)
            await drafter.start()
            try:
                await self._until_ready("draft")
            except ServiceDiedError as error:
                if drafter.is_running:  # not ready in time
                    self._notify("draft", error.message)
                    await drafter.stop(STOP_GRACE_S)

    async def stop(self) -> None:
        """Stops gateway, verify service and drafter in this order, so that no request meets a half-stopped stack."""
        drains = {"gateway": self.config.gateway, "verify": self.config.verify}
        for name in ("gateway", "verify", "draft"):
            if name in self._services:
                config = drains.get(name)
                drain_s = config.drain_timeout_s if config is not None else 0.0
                await self._services[name].stop(drain_s + STOP_GRACE_S)

    def kill(self) -> None:
        """Kills everything at once."""
        for service in self._services.values():
            service.kill()
