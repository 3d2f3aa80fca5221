"""`fleetctl report`: what the page holds, without a browser; `test_report_browser` looks at it."""

from __future__ import annotations

import html.parser
import json
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import report_stories
from fleet_desk import Desk, desk, moto_clients, wheels
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_stories import DAY, HOSTILE

from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.errors import NotFound
from spotheal.agent.protocol.names import LAYOUT
from spotheal.fleet.report.page import page
from spotheal.fleet.report.report import make
from spotheal.fleet.report.series import (
    Series,
    axis_of,
    brief,
    json_lines,
    losses,
    other_series,
    scores,
    series_of,
    thinned,
)

__all__ = ["desk", "moto_clients", "wheels"]


class Reader(html.parser.HTMLParser):
    """Tags, attributes and text; `open` is what was not closed."""

    VOID = ("meta", "line", "rect", "circle", "path")

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert tag == self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert [] == reader.open
    return reader


def made(story: str, **more: Any) -> str:
    material, now = getattr(report_stories, story)(**more)
    return page(make(material, now))


def test_a_finished_run_is_told_with_its_figures() -> None:
    text = read(made("finished")).text
    for said in ("12,000 steps", "4 instances in 3 zones", "machines were lost 3 times", "US dollars", "on-demand",
                 "taken by AWS", "An estimate", "us-west-2c", "free", "the trainer exited with 0"):  # fmt: skip
        assert said in text


def test_the_page_and_the_json_have_the_same_dollars() -> None:
    material, now = report_stories.finished()
    report = make(material, now)
    document = json.loads(json.dumps(report.to_document()))
    assert f"${document['receipt']['total']:,.2f}" in read(page(report)).text
    assert round(sum(line["dollars"] for line in document["receipt"]["lines"]), 2) == document["receipt"]["total"]
    assert (1, 2, 3) == (document["schema_version"], len(document["interruptions"]), len(document["resumes"]))
    assert {"loss", "val_acc"} < set(document["curves"])


@pytest.mark.parametrize("story", ["finished", "running", "hostile"])
def test_nothing_is_loaded_and_nothing_runs(story: str) -> None:
    text = made(story)
    reader = read(text)
    assert not {"script", "img", "iframe", "link", "object", "embed", "form", "a", "foreignobject"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name in ("src", "href", "style")]
    assert "url(" not in text and "@import" not in text
    assert "default-src 'none'" in dict(reader.attributes)["content"] or "default-src 'none'" in text[:600]


def test_hostile_names_and_figures_stay_text_and_the_page_stays_small() -> None:
    text = made("hostile", lines_of_metrics=100_000)
    assert len(text) < 1_500_000
    assert HOSTILE not in text and "&lt;/script&gt;" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    placed = {"x", "y", "x1", "x2", "y1", "y2", "d", "width", "height", "cx", "cy"}
    numbers = [value for name, value in read(text).attributes if name in placed]
    assert numbers and not [value for value in numbers if re.search(r"nan|inf|e\+", value)]


def test_a_run_that_has_launched_nothing_has_no_report() -> None:
    material, now = report_stories.empty()
    with pytest.raises(NotFound):
        make(material, now)


def test_a_trainer_that_writes_no_metrics_has_its_progress_drawn() -> None:
    material, now = report_stories.running()
    assert "" == material.metrics
    assert {"loss"} <= set(make(material, now).series)


def test_a_trainer_that_says_nothing_is_told_where_that_is_described() -> None:
    material, now = report_stories.running()
    silent = type(material)(material.facts, "", {})
    assert "docs/contract.md" in page(make(silent, now))


# ------------------------------------------------------------------------------------------------------------- figures
def test_what_is_no_finite_figure_at_a_whole_step_is_left_out() -> None:
    lines = ['{"step": 1, "loss": NaN, "acc": 0.5}', '{"step": 1.5, "loss": 2}', '{"step": 2, "loss": Infinity}', "[]",
             '{"step": 3, "loss": 0.25, "closes": true}', "{", '{"step": -1, "loss": 1}']  # fmt: skip
    found = series_of(json_lines("\n".join(lines)))
    assert {"acc": ((1, 0.5),), "loss": ((3, 0.25),)} == {name: one.points for name, one in found.items()}


def test_losses_and_scores_are_told_apart_by_name() -> None:
    names = ("loss", "val_loss", "val_acc", "lr", "samples_per_second", "f1", "nll")
    found = {name: Series(name, ((0, 1.0),)) for name in names}
    assert ["val_loss", "loss", "nll"] == [one.name for one in losses(found)]
    assert ["val_acc", "f1"] == [one.name for one in scores(found)]
    assert ["lr", "samples_per_second"] == [one.name for one in other_series(found)]


def test_a_figure_that_is_neither_loss_nor_score_has_a_chart_of_its_own() -> None:
    material, now = report_stories.running()
    lines = "\n".join(json.dumps({"step": step, "psnr <b>": 20.0 + step}) for step in range(1, 5))
    alone = page(make(type(material)(material.facts, lines, {}), now))
    assert "psnr &lt;b&gt; over the steps of the run." in alone and "Other figures" not in alone
    assert "docs/contract.md" not in alone
    losses = "\n".join(json.dumps({"step": step, "loss": 1 / step, "lr": 0.1}) for step in range(1, 5))
    beside = page(make(type(material)(material.facts, losses, {}), now))
    assert "<details><summary>Other figures: lr</summary>" in beside
    read(alone), read(beside)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), max_size=90), st.integers(8, 30))
def test_thinning_keeps_both_ends_and_the_extremes(points: list[tuple[float, float]], count: int) -> None:
    points.sort()
    found = thinned(points, count)
    assert len(found) <= max(count, 2) + 2 and set(found) <= set(points)
    if points:
        assert (points[0], points[-1]) == (found[0], found[-1])
        assert {min(y for _, y in points), max(y for _, y in points)} <= {y for _, y in found}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_every_figure_finds_its_place_on_the_axis(values: list[float]) -> None:
    axis = axis_of(values)
    assert all(0 <= axis.share(value) <= 1 for value in values)
    ticks = axis.ticks()
    assert len(ticks) <= 12 and all(len(brief(tick)) <= 8 for tick in ticks)


# ------------------------------------------------------------------------------------------------------------ the verb
def stored(desk: Desk) -> str:
    """A requested run whose instance has trained and ended, as its agent leaves it."""
    run = str(desk.request()["run"])
    store = desk.store(run)
    begun = rfc3339(DAY)
    lines = [
        {"event": "boot", "instance_type": "g5.xlarge", "launched": begun},
        {"event": "price", "dollars_per_hour": "0.36", "since": begun},
        {"event": "volume", "volume": "vol-1", "size_gib": 100, "type": "gp3"},
        {"event": "trainer-started", "attempt": 1, "resumed_step": 0},
        {"event": "end", "phase": "done", "time": rfc3339(DAY + timedelta(hours=1))},
    ]
    common = {"instance": "i-0a", "zone": "us-west-2a", "time": begun}
    store.append_lines(LAYOUT.ledger, [json.dumps({**common, **line}) for line in lines])
    store.put_bytes(LAYOUT.metrics, b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    store.put_bytes(LAYOUT.progress("i-0a"), json.dumps({"time": begun, "step": 2, "saved": 2}).encode())
    store.write_status({**(store.read_status() or {}), "phase": "done", "reason": "because"})
    return run


def test_the_verb_writes_a_page_and_the_same_figures_as_json(desk: Desk) -> None:
    stored(desk)
    result = desk.run("report")
    assert (0, "cifar-report.html") == (result.exit_code, result.stdout.strip())
    text = Path("cifar-report.html").read_text()
    assert "cifar" in text and "$0.36" in text
    document = desk.good("report")
    assert "done" == document["phase"] and document["curves"]["loss"]["last"] == 1.0
    assert 0.36 == next(line["dollars"] for line in document["receipt"]["lines"] if line["name"] == "Spot instances")


def test_a_file_that_is_no_report_is_not_replaced(desk: Desk) -> None:
    stored(desk)
    Path("mine.html").write_text("<h1>mine</h1>")
    result = desk.run("report", "--out", "mine.html")
    assert 2 == result.exit_code and "is no report" in result.output
    assert "<h1>mine</h1>" == Path("mine.html").read_text()
    assert 0 == desk.run("report", "--out", "new.html").exit_code == desk.run("report", "--out", "new.html").exit_code


def test_an_unknown_job_and_a_run_without_instances_are_not_found(desk: Desk) -> None:
    assert 4 == desk.run("report", "nobody").exit_code
    desk.request()
    result = desk.run("report")
    assert 4 == result.exit_code and "launched no instance" in result.output


def test_a_place_that_cannot_be_written_is_named(desk: Desk) -> None:
    stored(desk)
    result = desk.run("report", "--out", "nowhere/page.html")
    assert 2 == result.exit_code and "nowhere/page.html cannot be written" in result.output


def test_a_start_that_was_told_late_is_counted_by_its_first_sample() -> None:
    """The ledger holds no step where the trainer was slow to write one; no claim of `no step lost` is made of that."""
    material, now = report_stories.finished()
    events = [{**event, "resumed_step": None} if event["event"] == "trainer-started" else event
              for event in material.facts.events]  # fmt: skip
    late = replace(material, facts=replace(material.facts, events=tuple(events)))
    report = make(late, now)
    assert [0, 0, 288] == [one.again for one in make(material, now).resumes]
    assert 3 == len(report.resumes) and report.resumes[-1].again > 200 and report.receipt.steps.redone > 200
    blind = make(replace(late, progress={}), now)
    assert not blind.knows_every_resume and "no step was lost" not in page(blind)
    assert {None} == {resume.again for resume in blind.resumes}, "operator.md 10: 0 is a claim that nobody can make"
    assert "0 steps were done again" not in page(blind)


def test_a_machine_that_aws_took_without_notice_counts_as_lost() -> None:
    material, now = report_stories.finished()
    report = make(material, now)
    assert (3, 2) == (len(report.lost), len(report.taken))
    assert "1 without notice" in read(page(report)).text


def test_what_a_machine_did_between_its_last_word_and_a_death_without_notice_is_not_called_kept() -> None:
    material, now = report_stories.finished()
    events = [{**event, "resumed_step": 10**9} if event["event"] == "trainer-started" else event
              for event in material.facts.events]  # fmt: skip
    report = make(replace(material, facts=replace(material.facts, events=tuple(events))), now)
    assert 0 == report.receipt.steps.redone + report.receipt.steps.lost and report.knows_every_resume
    text = read(page(report)).text
    assert "no step was lost" not in text and "as far as is known" in text
