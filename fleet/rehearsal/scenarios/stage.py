"""What every rehearsal stands on: a cloud here that this process speaks to, a job requested in it, waiting for the end.

It talks to no AWS: `local_aws` refuses an endpoint that is not on this machine, and its credentials are no account's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import Fatal, WaitTimedOut
from spotheal.agent.protocol.secret_reference import SecretReference
from spotheal.fleet.rehearsal.scenarios.first_word import FirstWord
from spotheal.fleet.rehearsal.scenarios.job import REGION, STAND_IN_SECRET

if TYPE_CHECKING:
    from spotheal.agent.protocol.names import StoreUrl
    from spotheal.fleet.rehearsal.scenarios.cloud import Cloud
    from spotheal.fleet.rehearsal.scenarios.job import Rehearsed
    from spotheal.fleet.rehearsal.scenarios.watch import Watch
    from spotheal.fleet.request.gather import Ready
    from spotheal.fleet.request.plan import WriteSweep
    from spotheal.fleet.run.session import Session

LOOK_SECONDS = 0.2
_SETTLE_SECONDS_MAX = 20.0
# Of the operator's environment an instance gets only what makes the network and package indexes reachable from here.
_PASSED_ON = re.compile(r"(?i)(https?|no|all)_proxy|PIP_\w+|UV_\w+|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE")


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends a rehearsal as Ctrl-C does, so that nothing of it is left."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ------------------------------------------------------------------------------------------------------------ the cloud
def set_up(
    stack: ExitStack, folder: Path, seed: int, *, region: str = REGION, zones: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> Cloud:
    """A cloud with zones a to d and `zones`, which this process speaks to until `stack` closes.

    `environment`: what its instances get besides `passed_on()`.
    """
    # Imported here: moto takes seconds to import, and wrong files are named at once.
    from spotheal.fleet.rehearsal.scenarios.cloud import Cloud

    all_zones = tuple(sorted({*(f"{region}{letter}" for letter in "abcd"), *zones}))
    cloud = stack.enter_context(Cloud(folder, region, all_zones, seed, passed_on() | (environment or {})))
    cloud.endpoint.account.strict = True  # a role that nobody has made does not exist
    # What AWS answers for an absent object is not proven: with odd seeds it is the other answer.
    cloud.endpoint.authorization.key_counts_as_prefix = seed % 2 == 0
    stack.enter_context(local_aws(cloud.url, region, cloud.endpoint.key_of_person().environment, cloud.credentials))
    return cloud


def pass_roles(cloud: Cloud, document: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Let this process pass the roles that the fleet's file names, if they are none of spotheal's.

    The printed operator policy passes spotheal's own roles alone. A role of the user's may be passed by a policy of the
    user's, which a rehearsal cannot see: it goes on as the account's owner and says so.
    """
    from spotheal.fleet.rehearsal.services.authorization import OWNER
    from spotheal.iam.policies import JOB_ROLE, Scope

    ours = (Scope.instance_role, Scope.fleet_role)
    names = dict.fromkeys(re.findall(r":(?:role|instance-profile)/([\w+=,.@/-]+)", json.dumps(document)))
    foreign = [name for name in names if name not in ours and not name.startswith(JOB_ROLE)]
    if foreign:
        os.environ |= cloud.endpoint.key_of_person(OWNER).environment
        say(f"{', '.join(foreign)}: the printed operator policy does not pass it; yours must (iam:PassRole)")


@contextmanager
def local_aws(endpoint: str, region: str, key: Mapping[str, str], credentials: Path | None = None) -> Iterator[None]:
    """Environment in which every AWS client of this process speaks to `endpoint` with `key`, which is of no account.

    `credentials`: the file with the keys of the cloud's other people, as profiles.
    """
    if urlsplit(endpoint).hostname not in ("127.0.0.1", "localhost", "::1"):
        raise Fatal(f"a rehearsal speaks only to this machine, not to {endpoint}")
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("AWS_", "BOTO_")):
            del os.environ[name]
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        **key,
        "AWS_REGION": region,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": str(credentials or os.devnull),
        "AWS_EC2_METADATA_DISABLED": "true",
        **_without_proxy(os.environ),
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _without_proxy(environment: Any) -> dict[str, str]:
    named = [environment[name] for name in ("no_proxy", "NO_PROXY") if environment.get(name)]
    hosts = ",".join([*named, "127.0.0.1", "localhost"])
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def passed_on() -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
    return variables | _without_proxy(os.environ)


# ---------------------------------------------------------------------------------------------------------- the request
def request(
    session: Session, rehearsed: Rehearsed, *, sweep: WriteSweep | None = None,
    planned: Callable[[], None] = lambda: None,
) -> tuple[Ready, dict[str, Any]]:
    """Exactly what `fleetctl request` (or `sweep run`) does, after the same questions; what it made, too.

    `planned` is called between the plan and the first call that makes something of the run. The account's part (roles,
    groups, stand-ins for secrets) is made before, and the plan then finds nothing missing.
    """
    from spotheal.fleet.request import gather, plan, submit, wheelhouse

    clock, job = SystemClock(), rehearsed.job
    wishes = gather.Wanted(rehearsed.fleet, job, rehearsed.job_file, rehearsed.fleet_file)
    gather.settle_region(session, wishes)
    root = session.store_root(job.store.url)
    usable_at = make_account(session, rehearsed, root, is_sweep=sweep is not None)
    ready = gather.make_plan(
        session, wishes, plan.Begin(), root, wheelhouse.build(), clock, allow_paths=True, sweep=sweep
    )
    time.sleep(max(0.0, usable_at - time.monotonic()))
    planned()
    return ready, submit.carry_out(session, ready, clock, lambda _: None)


def make_account(session: Session, rehearsed: Rehearsed, root: StoreUrl, *, is_sweep: bool) -> float:
    """Carry out the steps of a request that are the account's, not the run's, and put the stand-ins for secrets.

    Returns the monotonic time from which IAM's part of it can be used.
    """
    from spotheal.fleet.account import prerequisites
    from spotheal.fleet.rehearsal.services import account
    from spotheal.fleet.run import secrets

    for text in set(rehearsed.job.secrets.values()):
        secrets.put(session, SecretReference.parse(text), STAND_IN_SECRET)
    state = prerequisites.look(session, rehearsed.fleet, rehearsed.job, root, sweep=is_sweep)
    for step in state.steps:
        prerequisites.make(session, step)
    return time.monotonic() + account.IAM_SECONDS


# ----------------------------------------------------------------------------------------------------- while it runs
def until_over(cloud: Cloud, watch: Watch, look: Callable[[], None], seconds_max: float) -> None:
    """Look, and call `look`, until the fleet is cancelled and no machine is left.

    WaitTimedOut after `seconds_max`, JobFailed if no agent ever says who it is.
    """
    first_word = FirstWord(cloud, [watch.store])
    while not watch.is_over():
        check_time(watch.seconds, seconds_max)
        first_word.check()
        watch.look()
        look()
        time.sleep(LOOK_SECONDS)
    # A fleet is `cancelled` when its last machine is gone, which takes EC2 a moment longer than the machine.
    limit = time.monotonic() + _SETTLE_SECONDS_MAX
    while any(fleet.state == "cancelled_terminating" for fleet in cloud.rules.fleets()) and time.monotonic() < limit:
        time.sleep(LOOK_SECONDS)
    watch.look(store_too=True)


def check_time(seconds: float, seconds_max: float) -> None:
    if seconds > seconds_max:
        raise WaitTimedOut(
            f"the rehearsal was not over after {seconds_max:.0f} s",
            next_step="look at its logs with --keep DIR, or rehearse a shorter job",
        )
