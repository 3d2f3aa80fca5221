"""Runs to make reports of: one as it happens, one still running, one whose every name and figure is hostile."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from spotheal.agent.protocol.clock import rfc3339
from spotheal.fleet.report.report import Material
from spotheal.fleet.report.series import Series
from spotheal.fleet.status.status import RunFacts

DAY = datetime(2026, 11, 21, 8, tzinfo=timezone.utc)
STEPS = 12_000
HOSTILE = "</script></style></title><img src=x onerror=alert(1)>\u202e\ud800\x00\x1b[31m" + "n" * 300


def seen(events: list[dict[str, Any]], status: dict[str, Any], **more: Any) -> RunFacts:
    fields: dict[str, Any] = {
        "job": "resnet50-cifar10", "run": "01KAHJ6W3FZ5T8Q0M2XV9RBYCD", "store": "s3://spotheal-123456789012-us-west-2/"
        "resnet50-cifar10/01KAHJ6W3FZ5T8Q0M2XV9RBYCD", "status": status,
        "fleet": {"fleet_id": "sfr-1", "requested_at": rfc3339(DAY), "prices": prices()}, "launches": (),
        "events": tuple(events), "fleet_state": "cancelled_terminating", "volumes": None, "instances": None, **more,
    }  # fmt: skip
    return RunFacts(**fields)


def prices() -> list[dict[str, Any]]:
    return [{"instance_type": name, "zone": zone, "spot": spot, "on_demand": listed}
            for name, spot, listed in (("g5.xlarge", 0.41, 1.006), ("g6.xlarge", 0.36, 0.805))
            for zone in ("us-west-2a", "us-west-2b", "us-west-2c")]  # fmt: skip


class Story:
    """Writes a ledger, the metrics file and the samples as a run goes on."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.progress: dict[str, list[dict[str, Any]]] = {}
        self.random = random.Random(7)
        self.step = self.saved = 0
        self.attempt = 0
        self.volume = ""

    def event(self, when: float, name: str, instance: str, zone: str, **fields: Any) -> None:
        moment = rfc3339(DAY + timedelta(minutes=when))
        self.events.append({"time": moment, "event": name, "instance": instance, "zone": zone, **fields})

    def stay(
        self, instance: str, kind: str, zone: str, begin: float, end: float, price: str, *, lifecycle: str = "spot",
        taken: bool = True, warned: bool = True, rate: float = 36.0,
    ) -> None:  # fmt: skip
        """One instance, from minute `begin` to `end`, at `rate` steps a minute."""
        launched = rfc3339(DAY + timedelta(minutes=begin))
        self.event(begin + 1.5, "boot", instance, zone, instance_type=kind, launched=launched, root_gib=75)
        self.event(begin + 1.6, "price", instance, zone, dollars_per_hour=price, since=launched, lifecycle=lifecycle)
        moved = bool(self.volume) and not self.volume.endswith(zone[-1])
        before = self.volume
        if not before or moved:
            self.volume = f"vol-0{self.attempt}{zone[-1]}"
        self.event(begin + 3, "volume", instance, zone, volume=self.volume, moved_from=before if moved else None,
                   size_gib=100, type="gp3")  # fmt: skip
        self.attempt += 1
        self.step = self.saved
        start = begin + (7 if moved else 4)
        self.event(start, "trainer-started", instance, zone, attempt=self.attempt, resumed_step=self.step)
        self._train(instance, start, end - (1.5 if warned else 0), rate)
        if taken and warned:
            ends = rfc3339(DAY + timedelta(minutes=end))
            self.saved = self.step
            self.event(end - 2, "notice", instance, zone, action="terminate", deadline=ends, ends=ends)
            self.event(end - 1.4, "trainer-ended", instance, zone, kind="interrupted", last_step=self.step,
                       saved_step=self.saved, attempt=self.attempt)  # fmt: skip
            self.event(end - 1.2, "handover", instance, zone, snapshot=f"snap-{self.attempt}", used_gib=41)

    def _train(self, instance: str, start: float, end: float, rate: float) -> None:
        lines = self.progress.setdefault(instance, [])
        minute = start
        while minute < end and self.step < STEPS:
            minute += 1
            self.step = min(STEPS, self.step + int(rate))
            loss = 2.3 * math.exp(-self.step / 3000) + 0.12 + self.random.gauss(0, 0.05 * math.exp(-self.step / 6000))
            if self.step - self.saved > rate * 9:
                self.saved = self.step
            moment = rfc3339(DAY + timedelta(minutes=minute))
            lines.append({
                "time": moment, "step": self.step, "saved": self.saved, "loss": loss,
                "save_seconds": 3.1 + self.random.random(), "stall_seconds": 0.08 + self.random.random() / 20,
            })  # fmt: skip
            epoch = self.step // 390
            self.metrics.append({"step": self.step, "epoch": epoch, "loss": loss, "samples_per_second": 4600})
            if self.step % 390 < rate:
                accuracy = 0.94 - 0.62 * math.exp(-self.step / 2600) + self.random.gauss(0, 0.006)
                self.metrics.append({"step": self.step, "epoch": self.step // 390, "closes": True, "train_loss": loss,
                                     "val_loss": loss * 1.08 + 0.05, "val_acc": accuracy, "lr": 0.1})  # fmt: skip

    def material(self, status: dict[str, Any], **more: Any) -> Material:
        text = {name: "".join(f"{json.dumps(line)}\n" for line in lines) for name, lines in self.progress.items()}
        return Material(seen(self.events, status, **more), "".join(f"{json.dumps(x)}\n" for x in self.metrics), text)


def finished() -> tuple[Material, datetime]:
    """Four machines: one taken in its first hour, one without a word, an on-demand rescue to the end."""
    story = Story()
    story.stay("i-0a1b2c3d4e5f60718", "g5.xlarge", "us-west-2a", 0, 47, "0.4100")
    story.stay("i-0b2c3d4e5f6071829", "g5.xlarge", "us-west-2b", 48, 188, "0.4385")
    story.stay("i-0c3d4e5f60718293a", "g6.xlarge", "us-west-2b", 190, 262, "0.3570", taken=False, warned=False)
    heard = rfc3339(DAY + timedelta(minutes=261.5))
    story.event(300, "predecessor", "i-0d4e5f60718293a4b", "us-west-2c", predecessor="i-0c3d4e5f60718293a", heard=heard,
                last_step=story.step)  # fmt: skip
    last = story.step
    story.stay("i-0d4e5f60718293a4b", "g5.xlarge", "us-west-2c", 298, 420, "1.006", lifecycle="on-demand", taken=False)
    assert last > 0
    story.event(421, "trainer-ended", "i-0d4e5f60718293a4b", "us-west-2c", kind="done", last_step=story.step,
                saved_step=story.step)  # fmt: skip
    story.event(422, "end", "i-0d4e5f60718293a4b", "us-west-2c", phase="done", reason="the trainer exited with 0")
    status = {"phase": "done", "reason": "the trainer exited with 0", "revision": "4f0c2a9d1e" * 4,
              "progress": {"step": story.step, "steps_total": STEPS}}  # fmt: skip
    return story.material(status), DAY + timedelta(hours=8)


def running() -> tuple[Material, datetime]:
    """One machine, half an hour old, without a metrics file."""
    story = Story()
    story.stay("i-0a1b2c3d4e5f60718", "g5.xlarge", "us-west-2a", 0, 31, "0.4100", taken=False, warned=False)
    story.metrics.clear()
    now = DAY + timedelta(minutes=31)
    status = {"phase": "training", "instance": "i-0a1b2c3d4e5f60718", "heartbeat": rfc3339(now), "revision": "0" * 40,
              "progress": {"step": story.step, "steps_total": STEPS}}  # fmt: skip
    return story.material(status), now


def hostile(lines_of_metrics: int = 10_000) -> tuple[Material, datetime]:
    """Markup, control characters and endless words for names; NaN, infinities and 1e300 for figures."""
    events = []
    for number in range(40):
        moment = DAY + timedelta(minutes=7 * number)
        common = {"instance": f"i-{HOSTILE}{number}", "zone": HOSTILE, "time": rfc3339(moment)}
        events += [
            {**common, "event": "boot", "instance_type": HOSTILE, "launched": rfc3339(moment), "root_gib": -1},
            {**common, "event": "price", "dollars_per_hour": "1e300" if number % 2 else "NaN"},
            {**common, "event": "volume", "volume": HOSTILE, "moved_from": HOSTILE, "size_gib": 1 << 60},
            {**common, "event": "trainer-started", "attempt": number, "resumed_step": number * 100},
            {**common, "event": "notice", "action": "terminate", "ends": rfc3339(moment + timedelta(minutes=5))},
            {**common, "event": "trainer-ended", "kind": HOSTILE, "last_step": number * 100 + 50, "saved_step": "x"},
        ]
    values: Iterator[float] = iter(random.Random(1).choices([1e300, -1e300, 1e-300, 0.5, 0.0, 3.0], k=lines_of_metrics))
    lines = [f'{{"step": {step}, "loss": {value}, "{"x" * 200}_acc": {value}, "val_loss": NaN, "acc": Infinity}}'
             for step, value in enumerate(values)]  # fmt: skip
    lines += ["[" * 5000, '{"step": 1e999}', '{"step": true, "loss": 1}', "\ud800"]
    lines.append(json.dumps({HOSTILE + "loss": 1, "step": 1}))
    status = {"phase": "failed", "reason": HOSTILE + "\n  | Traceback " + "w" * 9000, "revision": HOSTILE}
    progress = {HOSTILE: "\n".join(lines[:3000])}
    material = Material(seen(events, status, job=HOSTILE, store=HOSTILE), "\n".join(lines), progress)
    return material, DAY + timedelta(days=3)


def empty() -> tuple[Material, datetime]:
    """Requested, nothing launched yet."""
    return Material(seen([], {"phase": "requested"}, fleet={}), "", {}), DAY


# --------------------------------------------------------------------------------------------------------------- sweeps
def sweep(count: int = 40, name: str = "digits-mlp") -> tuple[dict[str, Any], dict[int, dict[str, Series]]]:
    """`count` runs over a rate, an optimizer, an activation and a network: a summary, and their curves."""
    dice = random.Random(5)
    rows: list[dict[str, Any]] = []
    found: dict[int, dict[str, Series]] = {}
    networks = [[10, 20, 30], [30, 50, 70], [128], [64, 32]]
    for index in range(count):
        own: dict[str, Any] = {
            "batch_size": 128, "epochs": 20, "lr": round(10 ** dice.uniform(-4.5, -0.7), 6),
            "dropout_rate": round(dice.uniform(0, 0.8), 2), "optimizer": dice.choice(["rmsprop", "adam", "sgd"]),
            "activate_fn": dice.choice(["relu", "tanh"]), "hidden_nodes": dice.choice(networks),
        }  # fmt: skip
        reached = 0.985 - 0.08 * (math.log10(own["lr"]) + 2.5) ** 2 - 0.2 * own["dropout_rate"] ** 2
        reached = max(0.1, reached - (0.1 if own["optimizer"] == "sgd" else 0) + dice.gauss(0, 0.01))
        late = "waiting" if index >= count - 3 else "running" if index >= count - 6 else "done"
        state = "failed" if index == 7 else late
        points = [] if state in ("failed", "waiting") else [
            (float(step), reached * (1 - math.exp(-step / 60)) + dice.gauss(0, 0.004)) for step in range(12, 241, 12)
        ][: 8 if state == "running" else None]  # fmt: skip
        found[index] = {"val_acc": Series("val_acc", tuple(points))} if points else {}
        metrics = {"val_acc": points[-1][1], "best_val_acc": max(y for _, y in points)} if points else {}
        rows.append({
            "index": index, "parameters": own, "state": state, "instances": int(state != "waiting"), "instance": None,
            "phase": state, "reason": "the trainer exited with 1 (out of memory?)" if state == "failed" else "",
            "step": int(points[-1][0]) if points else None, "steps_total": 240, "loss": 0.3 if points else None,
            "metrics": metrics,
        })  # fmt: skip
    states = [row["state"] for row in rows]
    counted = {state: states.count(state) for state in ("done", "failed", "running", "waiting")}
    document = {
        "job": name, "run": "01KAHJ6W3FZ5T8Q0M2XV9RBYCD", "phase": "training", "reason": "", "entries": rows,
        "store": "s3://spotheal-123456789012-us-west-2/digits-mlp/01KAHJ6W3FZ5T8Q0M2XV9RBYCD",
        "fleet": {"id": "sfr-1", "state": "active"}, "runs": {"all": count, **counted},
    }  # fmt: skip
    return document, found


def hostile_sweep() -> tuple[dict[str, Any], dict[int, dict[str, Series]]]:
    """Markup and endless words for names and values, one value of each parameter of another kind."""
    document, found = sweep(9, HOSTILE)
    for row in document["entries"]:
        number = row["index"]
        row["parameters"] = {HOSTILE: HOSTILE + str(number), "n": number or "none", "x": 10.0 ** (30 * number)}
        row["reason"] = HOSTILE
    return document, found
