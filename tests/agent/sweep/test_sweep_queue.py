"""The queue of a sweep in the store: claims whose answers are lost, and runs that are given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from spotheal.agent.aws.ec2 import Ec2
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import SystemClock
from spotheal.agent.protocol.errors import ExitCode
from spotheal.agent.protocol.names import LAYOUT, StoreUrl
from spotheal.agent.sweep.queue import Queue, give_back
from spotheal.agent.sweep.worker import EntryEnding
from spotheal.fleet.rehearsal.ec2.rulebook import Latencies, Rulebook
from spotheal.fleet.rehearsal.services.client import InMemoryEc2, InMemoryS3

CLOCK = SystemClock()


class NoCloud(Ec2):
    """In which every instance that is asked for runs."""

    def __init__(self) -> None:
        super().__init__(None)

    def instances(self, instances: Any) -> Any:
        return tuple(SimpleNamespace(id=one, state="running") for one in instances)


def a_store() -> Store:
    return Store(InMemoryS3("bucket"), StoreUrl("bucket", "j/r"))


def worker(store: Store, name: str, count: int = 2) -> Queue:
    return Queue(store, count, name, CLOCK)


def test_a_run_is_given_back_by_who_holds_it_and_by_nobody_else() -> None:
    """Of an instance that was long silent another may have taken it: two would then wait for the same volume."""
    store = a_store()
    store.put_json(LAYOUT.queue_claim(0, 1), {"instance": "i-1", "time": "2026-11-21T12:00:00Z"})
    store.put_json(LAYOUT.queue_claim(0, 2), {"instance": "i-2", "time": "2026-11-21T12:20:00Z"})
    assert not give_back(store, 0, "i-1", CLOCK)
    assert worker(store, "i-3").look()[0].holder == "i-2"
    assert give_back(store, 0, "i-2", CLOCK) and give_back(store, 0, "i-2", CLOCK)
    assert worker(store, "i-3").look()[0].holder == ""
    assert not give_back(store, 1, "i-2", CLOCK), "nobody has taken it"


def test_a_claim_whose_answer_is_lost_is_the_claimers_own_when_it_looks_again() -> None:
    store = a_store()
    put = store.client.put_object

    def loses_the_answer(**request: Any) -> Any:
        put(**request)
        raise ConnectionError("the answer is lost")

    store.client.put_object = loses_the_answer
    try:
        worker(store, "i-1").take(NoCloud())
    except ConnectionError:
        store.client.put_object = put
    other = worker(store, "i-2").take(NoCloud())
    again = worker(store, "i-1").take(NoCloud())
    assert (again.entry, other.entry) == (0, 1)
    assert store.keys(LAYOUT.queue) == ["queue/00000.0001", "queue/00001.0001"]


def test_who_counts_the_runs_that_are_over_reads_no_claim() -> None:
    """Each of ten thousand children counts them as it ends."""
    store = a_store()
    for index in range(5):
        store.put_json(LAYOUT.queue_claim(index, 1), {"instance": "i-1", "time": "2026-11-21T12:00:00Z"})
    store.put_json(LAYOUT.queue_ended(3, True), {})
    reads: list[str] = []
    get = store.client.get_object

    def counted(**request: Any) -> Any:
        reads.append(request["Key"])
        return get(**request)

    store.client.get_object = counted
    assert [entry.ended for entry in worker(store, "i-1", 5).ends()] == ["", "", "", "done", ""]
    assert reads == []


def test_a_machine_whose_interruption_did_not_come_true_looks_for_a_run_anew() -> None:
    """It has given its run back: beside the one that goes on with it, it would wait, and cost, until that one ends."""
    store = a_store()
    config = SimpleNamespace(index=0, store=store.url, sources=None)
    world, here = SimpleNamespace(s3=store.client), SimpleNamespace(instance="i-1")
    boot: Any = SimpleNamespace(config=config, world=world, here=here, clock=CLOCK)
    storage: Any = None
    ending = EntryEnding(boot, storage)
    handed_over: Any = SimpleNamespace(snapshot="snap-1", detached=True)
    ending.handed_over(handed_over)
    assert ending.code_if_withdrawn is None, "it was not given back: nobody else goes on with it"
    store.put_json(LAYOUT.queue_claim(0, 1), {"instance": "i-1", "time": "2026-11-21T12:00:00Z"})
    ending.handed_over(handed_over)
    assert ending.code_if_withdrawn == ExitCode.INTERRUPTED, "with 0 the agent would not be started again"


def test_more_holders_than_a_call_has_filter_values_are_asked_for_in_several() -> None:
    """`--parallel 300`: EC2 refuses more than 200 values in a call, and no instance would find a run any more."""
    rules = Rulebook(CLOCK, zones=("us-west-2a",), latencies=Latencies(running=0))
    made = rules.call("RunInstances", {"ImageId": "ami-1", "InstanceType": "m5.large", "MinCount": 3, "MaxCount": 3})
    there = [one["InstanceId"] for one in made["Instances"]]
    unknown = [f"i-{number:017x}" for number in range(500)]
    found = Ec2(InMemoryEc2(rules, validate=True)).instances([*unknown, *there])
    assert sorted(there) == [one.id for one in found]
