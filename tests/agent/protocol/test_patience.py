"""How long trouble is borne at boot: a refusal that passes ends no run, also where a bad network came before it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rulebook_world import VirtualClock

from spotheal.agent.cage import secrets
from spotheal.agent.cage.secrets import Vault
from spotheal.agent.life.preflight import patiently
from spotheal.agent.protocol.clock import never
from spotheal.agent.protocol.errors import PermissionDenied, Retryable, SetupFailed, SpothealError
from spotheal.agent.protocol.retry_budget import REFUSED_SECONDS_MAX, Patience
from spotheal.agent.record import boot_record
from spotheal.agent.record.boot_record import Launch
from spotheal.agent.repository.checkout import _Retry
from spotheal.agent.sweep import volume
from spotheal.agent.sweep.worker import Worker
from spotheal.agent.volume import heal

LOG = SimpleNamespace(
    warning=lambda text, **fields: logging.warning("%s %s", text, fields),
    error=lambda text, **fields: logging.error("%s %s", text, fields),
)


class Service:
    """Cannot be reached until `reached`, refuses until `allowed` (both seconds), then answers."""

    def __init__(self, clock: VirtualClock, reached: float, allowed: float) -> None:
        self.clock, self.reached, self.allowed = clock, reached, allowed

    def answer(self, *_: Any, **__: Any) -> Any:
        if self.clock.seconds < self.reached:
            raise Retryable("connect timeout")
        if self.clock.seconds < self.allowed:
            raise PermissionDenied("not authorized", code="AuthFailure")
        return None


def ask_looking_back(service: Service) -> None:
    patiently(service.answer, service.clock, never(), LOG)


def ask_to_count_the_launch(service: Service) -> None:
    here: Any = SimpleNamespace(instance="i-1", zone="a", instance_type="g5.xlarge")
    store: Any = SimpleNamespace(get_json=service.answer, count_launch=lambda *_: None)
    Launch.count(store, here, service.clock)


def ask_for_secrets(service: Service) -> None:
    vault = Vault(lambda name: None, service.clock, never(), LOG)
    object.__setattr__(vault, "_fetch", service.answer)
    vault._patiently({})


def ask_healing(service: Service) -> None:
    ctx: Any = SimpleNamespace(
        clock=service.clock, log=LOG, stop=never(), random=SimpleNamespace(random=lambda: 0.5)
    )
    patience = heal._Patience(ctx)
    while True:
        try:
            return service.answer()
        except SpothealError as error:
            patience.failed(error)


def ask_for_the_bundle(service: Service) -> None:
    where: Any = SimpleNamespace(clock=service.clock, stop=never())
    _Retry(where, LOG, 900.0, "the store").until_fetched(service.answer)


def ask_for_a_volume_of_a_sweep(service: Service) -> None:
    worker: Any = SimpleNamespace(
        _clock=service.clock, _cloud=None, _here=SimpleNamespace(zone="a"), _log=LOG,
        _world=SimpleNamespace(asked_to_stop=never()),
    )  # fmt: skip
    config: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(volume, "make", service.answer)
        why = Worker._make_volume(worker, config, config)
    if why:
        raise PermissionDenied(why)


ALL = [
    (ask_for_the_bundle, 200.0, 30.0, REFUSED_SECONDS_MAX),
    (ask_for_a_volume_of_a_sweep, 200.0, 30.0, REFUSED_SECONDS_MAX),
    (ask_looking_back, 200.0, 30.0, REFUSED_SECONDS_MAX),
    (ask_to_count_the_launch, boot_record.COUNT_SECONDS_MAX - 5, 30.0, boot_record.COUNT_SECONDS_MAX),
    (ask_for_secrets, 100.0, 5.0, secrets.REFUSED_SECONDS_MAX),
    (ask_healing, 400.0, 30.0, REFUSED_SECONDS_MAX),
]


@pytest.mark.parametrize(("ask", "unreached", "refused", "_"), ALL)
def test_a_refusal_after_minutes_of_a_bad_network_is_borne_as_any_other(
    ask: Callable[[Service], None], unreached: float, refused: float, _: float
) -> None:
    """Counted from the first fault of any kind it ended the run: the second EC2 met it."""
    ask(Service(VirtualClock(), unreached, unreached + refused))


@pytest.mark.parametrize(("ask", "_", "__", "limit"), ALL)
def test_a_refusal_that_stays_is_told(ask: Callable[[Service], None], _: float, __: float, limit: float) -> None:
    service = Service(VirtualClock(), 0.0, 1e9)
    with pytest.raises((PermissionDenied, SetupFailed)):
        ask(service)
    assert limit / 2 <= service.clock.seconds <= limit + 60


def test_trouble_that_has_passed_is_forgotten() -> None:
    clock = VirtualClock()
    patience = Patience(clock, 600.0)
    for _ in range(5):
        assert not patience.is_over(PermissionDenied("no"))
        clock.seconds += 100.0
        patience.succeeded()
    assert not patience.is_over(Retryable("busy"))
