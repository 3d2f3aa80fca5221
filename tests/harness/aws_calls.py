"""Which IAM actions the code needed while the tests ran: noted at every call to AWS, whoever answers it.

`record` puts itself in front of what answers here: botocore's clients, the in-memory ones, and the permission that the
rehearsal's endpoint asks at each request of a process (agents and bootstraps are processes there). conftest.py gathers
the notes of all workers and holds them against the tables of `iam/`.

Who calls is read off the stack: a function of fleetctl, or one of the agent above its two modules that know AWS. What
a test or the rehearsal itself asks for counts as nobody's, so it proves no need; it must be allowed to somebody all the
same where our own modules sent it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

NOBODY, _TRANSFER = "nobody", "transfer"
Note = tuple[str, str]  # (who, action); an operation that no table names stands as service:Operation
notes: set[Note] = set()

_OURS = "spotheal."
_FLEET, _REHEARSAL, _AGENT = "spotheal.fleet.", "spotheal.fleet.rehearsal.", "spotheal.agent."
_KNOW_AWS = frozenset({"spotheal.agent.aws.ec2", "spotheal.agent.aws.s3", "spotheal.agent.aws.clients"})
_FRONTS = ("services.client", "services.objects", "services.schedules", "services.efs", "batch.batch")
_ANSWER = frozenset(f"{_REHEARSAL}{name}" for name in _FRONTS)
_IAM_NAMES = {"service-quotas": "servicequotas", "efs": "elasticfilesystem"}  # where IAM has another name
_PROGRAMS = ("spotheal", "Python-urllib")  # in the User-Agent of agents and of bootstraps
_request = threading.local()


def record(modules: Mapping[str, Any]) -> None:
    """Put notes in front of what is imported by now (nothing is imported for it); again is harmless."""
    if client := modules.get("botocore.client"):
        _wrap(client.BaseClient, "_make_api_call", lambda self, operation, *_: note_call(
            self.meta.service_model.service_name, operation, getattr(self, "_spotheal_asked_by", "")))  # fmt: skip
    if manager := modules.get("s3transfer.manager"):
        for name in ("upload", "download"):
            _wrap(manager.TransferManager, name, _mark_transfer)
    if memory := modules.get(f"{_REHEARSAL}services.client"):
        _wrap(memory.InMemoryEc2, "_call", lambda self, operation, *_: note_call("ec2", operation))
    if batch := modules.get(f"{_REHEARSAL}batch.batch"):
        _wrap(batch.InMemoryBatch, "_call", lambda self, operation, *_: note_call(self._service, operation))
    if objects := modules.get(f"{_REHEARSAL}services.objects"):
        _wrap(objects.InMemoryS3, "_answer", lambda self, operation, *_: note_call("s3", operation))
    if schedules := modules.get(f"{_REHEARSAL}services.schedules"):
        _wrap(schedules.InMemoryScheduler, "_call", lambda self, operation, *_: note_call(
            "scheduler", f"{operation.title()}Schedule"))  # fmt: skip
    if efs := modules.get(f"{_REHEARSAL}services.efs"):
        _wrap(efs.InMemoryEfs, "_call", lambda self, operation, *_: note_call(
            "efs", "".join(word.title() for word in operation.split("_"))))  # fmt: skip
    if api := modules.get(f"{_REHEARSAL}scenarios.api"):
        _wrap(api.Endpoint, "__call__", _remember_program)
    if authorization := modules.get(f"{_REHEARSAL}services.authorization"):
        _wrap_questions(authorization.Authorization)


def note_call(service: str, operation: str, asked_by: str = "") -> None:
    """Note the actions of one call of an API."""
    from spotheal.iam.calls import CALLS

    who = caller()
    if who == _TRANSFER:
        who = asked_by
    if who:
        name = f"{_IAM_NAMES.get(service, service)}:{operation}"
        notes.update((who, action) for action in _actions(CALLS).get(name, (name,)))


def caller() -> str:
    """`operator`, `instance`, NOBODY (a test, by a module of ours that knows AWS), _TRANSFER (a thread of s3transfer),
    "" where no code of ours is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    found = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
        if module.startswith("s3transfer.") and not found:
            found = _TRANSFER
        if not module.startswith(_OURS) or module in _ANSWER:
            continue
        if module.startswith(_REHEARSAL):
            return NOBODY if found not in ("", _TRANSFER) else ""
        if module.startswith(_FLEET):
            return "operator"
        if module.startswith(_AGENT):
            found = "instance" if module not in _KNOW_AWS or found == "instance" else NOBODY
    return found


@functools.lru_cache(maxsize=1)
def _actions(calls: Any) -> dict[str, set[str]]:
    made: dict[str, set[str]] = {}
    for call in calls:
        for name in call.names:
            made.setdefault(name, set()).add(call.action)
    return made


def _mark_transfer(self: Any, *_: Any) -> None:
    """s3transfer calls in threads of its own: there the last who asked this client for a transfer counts."""
    self._client._spotheal_asked_by = caller()


def _remember_program(self: Any, environ: Mapping[str, Any], *_: Any) -> None:
    agent = str(environ.get("HTTP_USER_AGENT", ""))
    _request.is_ours = any(name in agent for name in _PROGRAMS)


def _wrap(owner: Any, name: str, before: Any) -> None:
    real = getattr(owner, name)
    if getattr(real, "_is_note", False):
        return

    @functools.wraps(real)
    def noted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        before(self, *arguments)
        return real(self, *arguments, **keywords)

    noted._is_note = True  # type: ignore[attr-defined]
    setattr(owner, name, noted)


def _wrap_questions(authorization: Any) -> None:
    """What IAM is asked for a process's request: that is the action itself, CreateTags while creating included."""
    real = authorization._all
    if getattr(real, "_is_note", False):
        return

    def noted(self: Any, asking: str, questions: Iterable[Any]) -> Any:
        def each() -> Iterator[Any]:
            for question in questions:
                if getattr(_request, "is_ours", False) and not asking.startswith("user/"):
                    notes.add(("instance", question.action))
                yield question

        return real(self, asking, each())

    noted._is_note = True  # type: ignore[attr-defined]
    authorization._all = noted


# --------------------------------------------------------------------------------------------------------- the verdict
def faults(found: Iterable[Note], allowed: Mapping[str, set[str]], is_whole: bool) -> list[str]:
    """What is wrong, in words: calls that no policy allows; where all tests ran, permissions that nothing needed.

    IAM asks about `NOT_CALLS` too, if a process makes the call that they belong to: they must be allowed, but prove no
    need."""
    from spotheal.iam.calls import NOT_CALLS

    notes = set(found)
    everybody = set().union(*allowed.values())
    wrong = [
        f"{who} called {action}, which no policy of {who}s allows"
        for who, action in sorted(notes)
        if action not in (everybody if who == NOBODY else allowed.get(who, set()))
    ]
    if is_whole:
        called = {who: {action for noted, action in notes if noted == who} for who in allowed}
        wrong += [
            f"{who}s are allowed {action}, which none of them called in any test"
            for who, actions in sorted(allowed.items())
            for action in sorted(actions - called[who] - set(NOT_CALLS))
        ]
    return wrong


def allowed() -> dict[str, set[str]]:
    """By who: the actions of the policies as they are generated.

    An operator here is whoever calls fleetctl, the administrator who makes the roles included.
    """
    from spotheal.agent.protocol.names import StoreUrl
    from spotheal.iam import policies

    key = "arn:aws:kms:us-west-2:123456789012:key/1"
    scope = policies.Scope("123456789012", "us-west-2", StoreUrl("bucket", "team"), kms_key=key)
    found: dict[str, set[str]] = {}
    for who, documents in policies.DOCUMENTS.items():
        name = "operator" if who.value == "administrator" else who.value
        statements = [statement for make in documents for statement in make(scope)["Statement"]]
        found.setdefault(name, set()).update(action for one in statements for action in one["Action"])
    return found
