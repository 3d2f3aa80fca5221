"""From a notice to the end of the machine: what is an event, and what is done in which order and time."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from handover_world import BEGIN, MOUNT, FakeClock, FakeImds, Machine
from imds_server import Imds, Reply, imds, wait_until

from spotheal.agent.aws.imds import NOTHING, REBALANCE, SPOT_ACTION, UNKNOWN, Metadata, Rebalance, SpotAction
from spotheal.agent.interruption.handover import HandoverResult, hand_over
from spotheal.agent.interruption.watcher import Interruption, Watcher, trainer_seconds
from spotheal.agent.protocol.clock import SystemClock, rfc3339
from spotheal.agent.protocol.contract import Notice
from spotheal.agent.protocol.errors import Fatal, Retryable


def later(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


TERMINATE = SpotAction("terminate", later(120))


class Watched:
    """A watcher on a fake clock, polled by hand; keeps the threads' calls."""

    def __init__(self, imds: FakeImds | None = None, clock: FakeClock | None = None) -> None:
        self.clock, self.imds = clock or FakeClock(), imds or FakeImds()
        self.told: list[Interruption] = []
        self.said: list[str] = []
        self.watcher = Watcher(self.imds, self.clock, on_notice=self.told.append, log=self.said.append)

    def polls(self, times: int = 1) -> Watched:
        for _ in range(times):
            self.watcher.poll()
            self.clock.sleep(2.0)
        return self

    def told_times(self, times: int) -> bool:
        return wait_until(lambda: len(self.told) == times)


# --------------------------------------------------------------------------------------------------- what is an event
def test_a_notice_is_an_event_with_the_deadline_of_the_trainer() -> None:
    seen = Watched(FakeImds([NOTHING, TERMINATE])).polls(2)
    assert seen.watcher.notice_event.is_set()
    assert seen.watcher.notice == Notice("terminate", later(80))
    assert seen.told_times(1)


def test_without_a_notice_nothing_happens() -> None:
    seen = Watched().polls(50)
    assert not seen.watcher.notice_event.is_set() and seen.watcher.notice is None


def test_the_same_notice_twice_is_one_event() -> None:
    seen = Watched(FakeImds([TERMINATE])).polls(20)
    assert seen.told_times(1)
    seen.clock.sleep(120.0)  # its time has passed, and nothing came of it
    seen.watcher.begin_again()
    seen.polls(20)
    assert not seen.watcher.notice_event.is_set() and len(seen.told) == 1


def test_another_time_is_another_event() -> None:
    seen = Watched(FakeImds([TERMINATE, SpotAction("terminate", later(100)), TERMINATE])).polls(5)
    assert seen.told_times(2)
    assert seen.watcher.notice == Notice("terminate", later(60))


def test_answers_without_sense_change_nothing() -> None:
    seen = Watched(FakeImds([UNKNOWN])).polls(300)
    assert not seen.watcher.notice_event.is_set()
    assert len([line for line in seen.said if "understood" in line]) == 1
    seen.imds.action = [TERMINATE]
    seen.imds.action = [SpotAction("terminate", later(720))]
    assert seen.polls().watcher.notice_event.is_set()
    seen.imds.action = [UNKNOWN]
    assert not seen.polls(50).watcher.withdrawn.is_set()


def test_a_notice_that_is_long_past_at_the_first_look_is_ignored() -> None:
    seen = Watched(FakeImds([UNKNOWN, SpotAction("terminate", later(-301))])).polls(100)
    assert not seen.watcher.notice_event.is_set() and not seen.watcher.withdrawn.is_set()
    seen.imds.action = [SpotAction("terminate", later(320))]
    assert seen.polls().watcher.notice_event.is_set(), "a later one counts"


def test_a_notice_just_past_at_the_first_look_counts_and_leaves_the_trainer_no_time() -> None:
    seen = Watched(FakeImds([SpotAction("stop", later(-100))])).polls()
    assert seen.watcher.notice == Notice("stop", later(0))


@pytest.mark.parametrize("jump", [-3600.0, 180.0, 3600.0])
def test_a_wall_clock_that_is_wrong_costs_no_notice_and_no_time(jump: float) -> None:
    seen = Watched(FakeImds([NOTHING, TERMINATE])).polls(1)
    seen.clock.skew = jump
    seen.polls(1)
    current = seen.watcher.interruption
    assert current is not None
    assert 110 <= current.ends_at - 1002 <= 120 and 70 <= current.trainer_until - 1002 <= 80


def test_a_jump_of_the_wall_clock_after_the_notice_moves_no_deadline() -> None:
    seen = Watched(FakeImds([TERMINATE])).polls()
    before = seen.watcher.interruption
    seen.clock.skew = 3600
    assert seen.polls(10).watcher.interruption == before


def test_hibernation_leaves_no_time() -> None:
    seen = Watched(FakeImds([SpotAction("hibernate", later(120))])).polls()
    assert seen.watcher.notice == Notice("hibernate", later(0))


@pytest.mark.parametrize("left, given", [(120, 80), (60, 20), (46, 6), (45, 5), (30, 5), (27, 2), (25, 0), (-9, 0)])
def test_a_late_notice_leaves_the_trainer_what_the_handover_can_spare(left: float, given: float) -> None:
    assert trainer_seconds("terminate", left) == given


def test_a_withdrawn_notice_is_seen_at_the_second_404() -> None:
    seen = Watched(FakeImds([TERMINATE, NOTHING, TERMINATE, NOTHING, UNKNOWN, NOTHING])).polls(5)
    assert not seen.watcher.withdrawn.is_set()
    assert seen.polls(1).watcher.withdrawn.is_set()


def test_a_notice_that_comes_again_while_the_agent_begins_again_is_not_forgotten() -> None:
    """404 twice, then there again: between the end of the handover and the new beginning, which writes to the store."""
    seen = Watched(FakeImds([TERMINATE, NOTHING, NOTHING, TERMINATE])).polls(4)
    seen.watcher.begin_again()
    assert seen.polls(1).watcher.notice_event.is_set()


def test_a_withdrawn_notice_that_comes_again_counts_again() -> None:
    seen = Watched(FakeImds([TERMINATE, NOTHING, NOTHING])).polls(3)
    seen.watcher.begin_again()
    assert not seen.watcher.withdrawn.is_set()
    seen.imds.action = [TERMINATE]
    assert seen.polls().watcher.notice == Notice("terminate", later(80))
    assert seen.told_times(2)


def test_shutdown_without_a_notice_is_an_interruption_that_cannot_be_withdrawn() -> None:
    seen = Watched().polls()
    seen.watcher.shutdown(later(92))
    assert seen.polls(10).watcher.notice == Notice("shutdown", later(52))
    assert seen.watcher.shutting_down.is_set() and not seen.watcher.withdrawn.is_set()


def test_shutdown_after_a_notice_keeps_the_notice() -> None:
    seen = Watched(FakeImds([TERMINATE])).polls()
    seen.watcher.shutdown(later(30))
    assert seen.watcher.notice == Notice("terminate", later(80))


def test_a_recommendation_is_one_event_and_no_interruption() -> None:
    imds = FakeImds(recommendation=[NOTHING, UNKNOWN, Rebalance(BEGIN), Rebalance(BEGIN), Rebalance(later(60))])
    called = threading.Semaphore(0)
    watcher = Watcher(imds, FakeClock(), on_rebalance=called.release)
    for _ in range(10):
        watcher.poll()
    assert watcher.rebalance.is_set() and not watcher.notice_event.is_set()
    assert [called.acquire(timeout=5), called.acquire(timeout=5), called.acquire(timeout=0.05)] == [True, True, False]


class SickMetadata(Metadata):
    """The real client over a service of which a plan says, second by second, how it feels."""

    def __init__(self, clock: FakeClock, rng: random.Random, notice_at: float | None) -> None:
        super().__init__("http://127.0.0.1:1", clock)
        self.fake, self.rng, self.notice_at = clock, rng, notice_at
        self.moods = [(0.0, rng.choice(["well", "down"]))]  # from when, how
        while self.moods[-1][0] < 900:
            mood = rng.choice(["well"] * 6 + ["down", "refused", "401", "500", "html", "garbage", "slow"])
            self.moods.append((self.moods[-1][0] + rng.choice([1, 5, 10, 60, 600]) * rng.uniform(0.5, 1.5), mood))

    def well_from(self, moment: float) -> float:
        """The first moment from there on at which the service is well, and stays so for ten seconds."""
        ends = [begin for begin, _ in self.moods[1:]] + [1e9]
        for (begin, mood), end in zip(self.moods, ends, strict=True):
            if mood == "well" and end - max(begin, moment) > 10:
                return max(begin, moment)
        return 1e9

    def _send(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        mood = next(how for begin, how in reversed(self.moods) if begin <= self.fake.elapsed)
        self.fake.sleep({"down": 2.0, "slow": 1.9}.get(mood, 0.01))
        if mood in ("down", "refused"):
            raise Retryable("no answer")
        if mood in ("401", "500"):
            return int(mood), ""
        if mood in ("html", "garbage"):
            return 200, "<html>hotel wifi</html>" if mood == "html" else '{"action": "term'
        if method == "PUT":
            return 200, "token"
        if path == SPOT_ACTION and self.notice_at is not None and self.fake.elapsed >= self.notice_at:
            return 200, f'{{"action": "terminate", "time": "{rfc3339(later(self.notice_at + 120))}"}}'
        return 404, ""


def test_an_ailing_service_makes_no_false_notice_and_delays_a_true_one_by_a_poll() -> None:
    """200 plans of 15 minutes: down for minutes, refusing, slow, 401, 500, HTML, cut JSON."""
    timely = 0
    for seed in range(200):
        rng = random.Random(seed)
        clock = FakeClock()
        metadata = SickMetadata(clock, rng, notice_at=rng.choice([None, rng.uniform(0, 600)]))
        watcher = Watcher(metadata, clock)
        found = None
        while clock.elapsed < 900 and found is None:
            watcher.poll()
            found = clock.elapsed if watcher.notice_event.is_set() else None
            clock.sleep(2.0)
        assert not watcher.withdrawn.is_set()
        if metadata.notice_at is None:
            assert found is None, f"seed {seed}: a false notice"
        else:
            well = metadata.well_from(metadata.notice_at)
            if well < metadata.notice_at + 120:  # later the machine is gone
                timely += 1
                late = well + 2 + 1 + 2  # a poll, a second, and a question that hung before the service was well
                assert found is not None and found <= late, f"seed {seed}: well at {well}, found at {found}"
            assert found is None or found >= metadata.notice_at
    assert timely > 40


# -------------------------------------------------------------------------------------------- against a real service
@pytest.fixture
def service() -> Iterator[Imds]:
    with imds() as running:
        yield running


@pytest.fixture
def watching(service: Imds) -> Iterator[Watcher]:
    clock = SystemClock()
    watcher = Watcher(Metadata(service.endpoint, clock, timeout_seconds=0.2), clock, poll_seconds=0.05)
    watcher.start()
    yield watcher
    watcher.stop()
    assert not any(thread.name == "interruption" for thread in threading.enumerate())


def notice_in(seconds: float) -> str:
    return f'{{"action": "terminate", "time": "{rfc3339(SystemClock().now() + timedelta(seconds=seconds))}"}}'


def test_the_thread_finds_a_notice_after_every_kind_of_nonsense(service: Imds, watching: Watcher) -> None:
    nonsense = [Reply(500), Reply(body=b"<html>captive portal</html>"), Reply(body=b'{"action": "terminate"}'),
                Reply(429), Reply(body=b"\xff\xff"), Reply(delay_seconds=1), Reply(401), Reply(302)]  # fmt: skip
    service.says(SPOT_ACTION, *nonsense, Reply(404))
    assert wait_until(lambda: len(service.replies[SPOT_ACTION]) == 1, 15)
    assert not watching.notice_event.is_set()
    service.expire_tokens()
    service.says(SPOT_ACTION, notice_in(120))
    assert watching.notice_event.wait(10)
    assert watching.notice is not None and watching.notice.action == "terminate"
    service.forgets(SPOT_ACTION)
    assert watching.withdrawn.wait(10)


def test_the_thread_finds_a_recommendation(service: Imds, watching: Watcher) -> None:
    service.says(REBALANCE, '{"noticeTime": "2026-11-21T08:22:00Z"}')
    assert watching.rebalance.wait(10)
    assert not watching.notice_event.is_set()


def test_a_callback_that_fails_ends_no_watch(service: Imds) -> None:
    said: list[str] = []

    def fail(interruption: Interruption) -> None:
        raise Retryable("the store is not there")

    watcher = Watcher(Metadata(service.endpoint), SystemClock(), poll_seconds=0.02, on_notice=fail, log=said.append)
    assert not watcher.is_alive
    service.says(SPOT_ACTION, notice_in(120))
    watcher.start()
    assert wait_until(lambda: "on-notice: the store is not there" in said)
    service.says(SPOT_ACTION, notice_in(60))
    assert wait_until(lambda: said.count("on-notice: the store is not there") == 2)
    assert watcher.is_alive
    watcher.stop()
    assert not watcher.is_alive


# --------------------------------------------------------------------------------------------------------- the handover
def handed_over(machine: Machine, seconds_left: float = 120.0, action: str = "terminate") -> HandoverResult:
    """The whole way from a notice; every history is held against the invariants."""
    watcher = Watcher(FakeImds([SpotAction(action, later(seconds_left))]), machine.clock)
    watcher.poll()
    current = watcher.interruption
    assert current is not None
    machine.watcher = watcher
    result = hand_over(current, MOUNT, machine, machine.steps(), machine.clock, watcher)
    check(machine, current)
    return result


def check(machine: Machine, current: Interruption) -> None:
    until, end = current.trainer_until - 1000, current.ends_at - 1000
    assert not machine.when("detached while mounted")
    assert all(moment >= until - 1e-6 for moment in machine.when("trainer killed")), "killed before its deadline"
    for detached in machine.when("detached"):
        assert min(machine.when("snapshot listed"), default=1e9) <= detached, "detached before the snapshot was listed"
        assert min(machine.when("unmounted"), default=1e9) <= detached
    asked, bases = machine.when("snapshot asked"), machine.when("base asked")
    ended = machine.when("trainer ended")[0]
    frozen = machine.when("frozen")
    off = min(machine.when("unmounted") + frozen, default=1e9)
    assert (off < 1e9) == bool(asked), "a handover if, and only if, all is on the device"
    if asked:
        assert off <= asked[0] <= max(ended + 10, off + 1), f"handover asked {asked[0] - ended:.1f} s after the end"
        assert end - ended < 30 or asked[0] <= end - 20, f"handover asked {end - asked[0]:.1f} s before the end"
    assert asked or bases or not machine.mounted or machine.when("withdrawn"), "nothing makes the next snapshot small"
    assert not (asked and bases), "EC2 takes one snapshot in 15 s"
    assert not (frozen and not machine.mounted), "froze what was unmounted"
    order = [what for _, what in machine.history if what in ("trainer ended", "logs left", "reported")]
    assert order == ["trainer ended", "logs left", "reported"]


def test_all_goes_well() -> None:
    machine = Machine(FakeClock())
    result = handed_over(machine)
    assert (result.unmounted, result.snapshot, result.detached, result.reported, result.faults) == (
        True, "snap-1", True, True, [])  # fmt: skip
    assert result.margin_seconds is not None and result.margin_seconds > 100
    assert [what for _, what in machine.history] == [
        "trainer ended", "logs left", "unmounted", "snapshot asked", "snapshot listed", "detached", "reported",
    ]  # fmt: skip


def test_a_trainer_that_ignores_sigterm_is_given_its_whole_time() -> None:
    machine = Machine(FakeClock(), trainer_stops_after=None)
    result = handed_over(machine)
    assert machine.when("trainer killed") == [80.0]
    assert result.margin_seconds is not None and result.margin_seconds >= 30


def test_holders_are_killed_only_after_five_busy_seconds() -> None:
    machine = Machine(FakeClock(), busy_until=1e9, holders_pids=(77, 78))
    result = handed_over(machine)
    assert machine.when("killed holders")[0] >= machine.when("trainer ended")[0] + 4.4
    assert (result.killed, result.unmounted, result.detached) == ((77, 78), True, True)


def test_a_mount_that_frees_itself_kills_nobody() -> None:
    machine = Machine(FakeClock(), busy_until=7.0)
    result = handed_over(machine)
    assert (result.unmounted, machine.when("killed holders")) == (True, [])


def test_a_mount_that_stays_busy_is_frozen_and_stays_attached() -> None:
    machine = Machine(FakeClock(), trainer_stops_after=None, busy_until=1e9, kill_frees=False)
    result = handed_over(machine)
    assert [what for _, what in machine.history][-6:] == [
        "synced", "frozen", "snapshot asked", "snapshot listed", "reported", "thawed",
    ]  # fmt: skip
    assert (result.unmounted, result.detached, result.snapshot, machine.attached) == (False, False, "snap-1", True)


def test_a_volume_that_the_logs_still_write_to_is_not_frozen() -> None:
    machine = Machine(FakeClock(), busy_until=1e9, kill_frees=False, logs_fault=OSError(5, "Input/output error"))
    result = handed_over(machine)
    assert (result.frozen, machine.when("synced") != [], machine.when("frozen")) == (False, True, [])
    assert (result.snapshot, result.detached, len(machine.when("base asked"))) == ("", False, 1)


def test_no_handover_is_taken_before_the_kernel_has_written_out_what_the_trainer_left_in_memory() -> None:
    """Two gigabytes of a torch.save at 125 MB/s: `umount` returns after 16 s, and nothing can be frozen meanwhile."""
    machine = Machine(FakeClock(), unmount_seconds=16.0, freeze_fault=Retryable("nothing is mounted there"))
    result = handed_over(machine)
    assert machine.when("snapshot asked")[0] >= machine.when("unmounted")[0] >= machine.when("trainer ended")[0] + 16
    assert (result.snapshot, result.detached, machine.when("base asked")) == ("snap-1", True, [])


def test_without_a_snapshot_nothing_is_detached() -> None:
    machine = Machine(FakeClock(), snapshot_faults=10**9)
    result = handed_over(machine)
    assert (result.snapshot, result.detached, result.reported, result.unmounted) == ("", False, True, True)
    assert 20 < len(machine.when("snapshot asked")) < 200


def test_throttling_of_snapshot_and_detach_is_outlasted() -> None:
    result = handed_over(Machine(FakeClock(), snapshot_faults=20, detach_faults=20))
    assert (result.snapshot, result.detached) == ("snap-1", True)


def test_a_snapshot_without_a_name_is_none() -> None:
    machine = Machine(FakeClock(), snapshot_id="")
    result = handed_over(machine)
    assert (result.snapshot, result.detached, result.faults) == (
        "", False, ["could not create the handover snapshot: no snapshot was made"])  # fmt: skip


def test_a_refused_snapshot_is_not_asked_for_again() -> None:
    machine = Machine(FakeClock(), snapshot_fatal=True)
    result = handed_over(machine)
    assert (len(machine.when("snapshot asked")), result.detached, result.reported) == (1, False, True)


def test_credentials_that_are_without_rights_for_a_while_cost_no_handover() -> None:
    """Those that IMDS has just rotated; healing bears the same for two minutes."""
    machine = Machine(FakeClock(), denied_until=12.0)
    result = handed_over(machine)
    assert (result.snapshot, result.detached, result.reported) == ("snap-1", True, True)


def test_a_role_that_may_take_no_snapshot_still_tells_the_status_in_time() -> None:
    machine = Machine(FakeClock(), denied_until=1e9)
    result = handed_over(machine)
    assert (result.snapshot, result.detached, result.reported) == ("", False, True)
    assert machine.when("reported")[0] <= 101.0


def test_a_detach_or_a_report_that_fails_is_told() -> None:
    result = handed_over(Machine(FakeClock(), detach_faults=10**9, report_fault=Fatal("denied")))
    assert result.faults == ["could not detach the volume: throttled", "could not store the status: denied"]
    assert (result.detached, result.reported) == (False, False)


def test_memory_that_is_written_out_for_minutes_delays_no_snapshot() -> None:
    result = handed_over(Machine(FakeClock(), trainer_stops_after=None, unmount_seconds=400))
    assert (result.unmounted, result.detached, result.snapshot) == (False, False, "snap-1")


def test_still_alive_five_minutes_after_the_time_means_begin_again() -> None:
    machine = Machine(FakeClock(), busy_until=1e9, kill_frees=False)
    result = handed_over(machine)
    assert (result.begin_again, machine.frozen) == (True, False)
    assert 419 <= machine.clock.elapsed <= 422


def test_a_withdrawn_notice_means_begin_again_at_once() -> None:
    machine = Machine(FakeClock())
    machine.clock.at(60, machine.withdraw)
    assert handed_over(machine).begin_again
    assert machine.clock.elapsed <= 61


def test_a_shutdown_while_waiting_for_the_end_lets_us_go() -> None:
    machine = Machine(FakeClock())
    machine.clock.at(118, machine.shut_down)
    assert not handed_over(machine).begin_again
    assert machine.clock.elapsed <= 120


def test_at_shutdown_we_do_not_wait_to_be_ended() -> None:
    machine = Machine(FakeClock())
    watcher = Watcher(FakeImds(), machine.clock)
    watcher.shutdown(later(90))
    current = watcher.interruption
    assert current is not None
    result = hand_over(current, MOUNT, machine, machine.steps(), machine.clock, watcher)
    check(machine, current)
    assert (result.detached, result.begin_again) == (True, False)
    assert machine.clock.elapsed < 20


def test_before_the_mount_only_the_status_is_written() -> None:
    machine, watched = Machine(FakeClock(), mounted=False), Watched(FakeImds([TERMINATE])).polls()
    current = watched.watcher.interruption
    assert current is not None
    result = hand_over(current, "", machine, machine.steps(), machine.clock, watched.watcher)
    assert (result.snapshot, result.detached, result.reported) == ("", False, True)
    assert not machine.when("snapshot asked")


def test_no_mishap_breaks_the_order_or_the_margins() -> None:
    """400 worlds, each with several mishaps at once."""
    for seed in range(400):
        rng = random.Random(seed)
        machine = Machine(
            FakeClock(),
            trainer_stops_after=rng.choice([None, 0.0, rng.uniform(0, 100)]),
            logs_fault=rng.choice([None, None, OSError(28, "No space left on device")]),
            busy_until=rng.choice([0.0, rng.uniform(0, 130), 1e9]),
            holders_pids=rng.choice([(), (4, 5)]),
            kill_frees=rng.random() < 0.5,
            unmount_seconds=rng.choice([0.05, rng.uniform(0, 10), 400.0]),
            unmount_faults=rng.choice([0, 0, rng.randrange(30)]),
            freeze_fault=rng.choice([None, Retryable("fsfreeze failed")]),
            snapshot_seconds=rng.choice([0.1, rng.uniform(0, 40)]),
            snapshot_faults=rng.choice([0, 0, rng.randrange(100)]),
            snapshot_fatal=rng.random() < 0.1,
            detach_faults=rng.choice([0, 0, 3, 10**9]),
            report_fault=rng.choice([None, Retryable("no network")]),
        )
        if rng.random() < 0.3:
            machine.clock.at(rng.uniform(0, 400), machine.withdraw)
        story = replace(machine, history=[])
        try:
            result = handed_over(machine, rng.choice([120.0, 120.0, rng.uniform(1, 120)]))
        except AssertionError as fault:
            raise AssertionError(f"seed {seed}: {fault}\n{story}\n{machine.history}") from fault
        assert result.begin_again and not machine.frozen
        assert result.reported == (machine.report_fault is None)
