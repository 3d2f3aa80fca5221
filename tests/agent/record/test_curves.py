"""What the report's curves are made of: shipped whole, bounded, whatever a trainer puts into its metrics file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from money_world import Hours, Kept

from spotheal.agent.protocol.contract import Progress, Saved
from spotheal.agent.protocol.errors import Retryable
from spotheal.agent.protocol.names import LAYOUT
from spotheal.agent.record import metrics_shipping
from spotheal.agent.record.metrics_shipping import SAMPLES_MAX, Curves, thinned
from spotheal.agent.trainer.progress_files import drop_metrics_after


class Shipped(Kept):
    def put_bytes(self, key: str, body: bytes, content_type: str = "") -> None:
        if self.down:
            raise Retryable("S3 does not answer")
        self.objects[key] = body


def samples(store: Shipped, name: str = "i-0a") -> list[dict[str, object]]:
    return [json.loads(line) for line in store.objects[LAYOUT.progress(name)].splitlines()]


def test_the_metrics_file_and_the_samples_are_put_when_they_changed(tmp_path: Path) -> None:
    clock, store, file = Hours(), Shipped(), tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2}\n')
    one = Curves(store, clock, "i-0a", file)
    one.note(Progress(5, loss=2.0, extra={"save_seconds": 3.5}, saved=Saved(4, "/c/4", "")))
    one.ship_when_due()
    assert b'{"step": 1, "loss": 2}\n' == store.objects[LAYOUT.metrics]
    assert [(5, 4, 3.5)] == [(line["step"], line["saved"], line["save_seconds"]) for line in samples(store)]
    assert [] == one.read()
    clock.seconds += 1
    one.note(Progress(6, saved=Saved(4, "/c/4", "")))  # too soon after the last, and nothing new is safe
    assert [] == one.read()
    one.note(Progress(7, saved=Saved(7, "/c/7", "")))
    assert one.ship() and [5, 7] == [line["step"] for line in samples(store)]


def test_what_a_store_that_was_down_did_not_take_is_put_later(tmp_path: Path) -> None:
    store, file = Shipped(), tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n')
    one = Curves(store, Hours(), "i-0a", file)
    one.note(Progress(1))
    store.down = True
    assert not one.ship()
    store.down = False
    assert one.ship() and {LAYOUT.metrics, LAYOUT.progress("i-0a")} == set(store.objects)


def test_samples_of_an_earlier_start_on_the_instance_stay(tmp_path: Path) -> None:
    store = Shipped()
    for step in (1, 2):
        one = Curves(store, Hours(), "i-0a", tmp_path / "none")
        one.note(Progress(step))
        assert one.ship()
    assert [1, 2] == [line["step"] for line in samples(store)]


def test_samples_are_bounded_and_keep_the_whole_time(tmp_path: Path) -> None:
    clock, store = Hours(), Shipped()
    one = Curves(store, clock, "i-0a", tmp_path / "none")
    for step in range(30_000):
        clock.seconds += 10
        one.note(Progress(step))
    assert one.ship()
    found = [int(str(line["step"])) for line in samples(store)]
    assert SAMPLES_MAX / 2 <= len(found) <= SAMPLES_MAX and found[0] < 10 and found[-1] > 29_900


def test_a_large_metrics_file_is_thinned_and_epochs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_shipping, "METRICS_BYTES_MAX", 20_000)
    store, file = Shipped(), tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(10_000)]
    for step in range(500, 10_000, 1000):
        lines[step] = json.dumps({"step": step, "closes": True, "val_loss": 1.0})
    file.write_text("\n".join(lines) + "\n" + '{"step": 99')
    assert Curves(store, Hours(), "i-0a", file).ship()
    body = store.objects[LAYOUT.metrics]
    assert len(body) <= 20_000 and 10 == body.count(b"closes") and body.endswith(b"}\n")
    assert len(body.splitlines()) > 100


@pytest.mark.parametrize("kind", ["missing", "link", "folder", "pipe"])
def test_what_is_no_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "metrics.jsonl"
    if kind == "link":
        (tmp_path / "secret").write_text("x\n")
        file.symlink_to(tmp_path / "secret")
    elif kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    assert [] == Curves(Shipped(), Hours(), "i-0a", file).read()
    assert 0 == drop_metrics_after(file, 1)


def test_one_endless_line_is_nothing() -> None:
    assert b"" == thinned(b"x" * 5000 + b"\n", 100) == thinned(b"x" * 50, 100)


def test_lines_without_end_are_thinned_without_a_look_at_each_for_every_doubling() -> None:
    """64 MiB of line ends took 92 s and 1.5 GiB at each heartbeat."""
    assert b'{"step":1}\n' == thinned(b"\n" * (8 << 20) + b'{"step":1}\n', 1000)
    kept = thinned(b'"closes"\n' * 2_000_000, 10_000)
    assert 5_000 < len(kept) <= 10_000 and {b'"closes"'} == set(kept.split(b"\n")[:-1])
