"""`fleetctl sweep report`: which metric, which curve, which parameters; the page. Laid out in test_report_browser."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest
import report_stories
from fleet_desk import Desk, desk, moto_clients, wheels
from test_sweep import sweep

from spotheal.agent.protocol.errors import ExitCode
from spotheal.agent.protocol.names import LAYOUT
from spotheal.fleet.report.series import Series
from spotheal.fleet.sweep import report, report_charts
from spotheal.fleet.sweep.report_page import page

__all__ = ["desk", "moto_clients", "wheels"]


def row(**metrics: float) -> dict[str, Any]:
    return {"loss": metrics.pop("loss", None), "metrics": metrics}


def test_without_a_name_the_best_validated_score_counts_and_else_a_loss() -> None:
    known = report.metrics_of([row(loss=0.5, val_loss=0.4, val_acc=0.9, best_val_acc=0.95, train_acc=1.0, seconds=3.0)])
    assert known[:4] == ["best_val_acc", "val_acc", "train_acc", "val_loss"]
    assert report.metrics_of([row(loss=0.5, samples=3.0)])[0] == "loss"
    assert report.metrics_of([row()]) == []


def test_a_run_whose_progress_tells_no_figures_has_the_last_ones_of_its_metrics_file() -> None:
    curves = {0: {"loss": Series("loss", ((1.0, 0.9), (2.0, 0.5))), "acc": Series("acc", ((2.0, 0.8),))},
              1: {"loss": Series("loss", ((1.0, 0.7),))}}  # fmt: skip
    rows: list[dict[str, Any]] = [{"index": 0, **row()}, {"index": 1, **row(loss=0.1)}, {"index": 2, **row()}]
    report.fill_in(rows, curves)
    assert [one["loss"] for one in rows] == [0.5, 0.1, None]
    assert [one["metrics"] for one in rows] == [{"acc": 0.8}, {}, {}]


@pytest.mark.parametrize(
    ("metric", "lower"),
    [("loss", True), ("val_loss", True), ("ppl", True), ("error", True), ("val_acc", False), ("best_val_f1", False),
     ("reward", False), ("epoch_seconds", True), ("whatever", False)],
)  # fmt: skip
def test_which_end_is_best_follows_from_the_name(metric: str, lower: bool) -> None:
    assert report.is_lower_better(metric) is lower


def test_an_accuracy_is_shown_in_percent_and_a_loss_or_a_reward_is_not() -> None:
    names = ("val_accuracy", "f1", "loss", "rmse", "reward")
    shown = {name: report_charts.is_share(name, [0.3, 0.9]) for name in names}
    assert shown == {"val_accuracy": True, "f1": True, "loss": False, "rmse": False, "reward": False}
    assert not report_charts.is_share("accuracy", [91.2, 93.0]), "it is in percent already"


def test_the_curve_of_a_best_value_is_that_of_the_value() -> None:
    line = Series("", ((1.0, 2.0),))
    assert report.curve_of("best_val_acc", {0: {"val_acc": line, "loss": line}}) == "val_acc"
    assert report.curve_of("loss", {0: {"val_loss": line, "train_loss": line}}) == "val_loss"
    assert report.curve_of("f1", {0: {"loss": line}}) == "loss"
    assert report.curve_of("f1", {0: {}}) == ""


def test_parameters_are_numbers_or_words_and_those_alike_everywhere_are_apart() -> None:
    entries = [{"lr": 0.1, "act": "relu", "n": [1, 2], "epochs": 3, "two": 1, "mixed": 1},
               {"lr": 0.01, "act": "tanh", "n": [1], "epochs": 3, "two": 2, "mixed": "x"},
               {"lr": 1, "act": "relu", "n": [1, 2], "epochs": 3, "two": 1, "only": True}]  # fmt: skip
    differing, same = report.parameters_of(entries)
    assert same == {"epochs": 3}
    assert {one.name: one.numeric for one in differing} == {
        "lr": True, "act": False, "n": False, "two": False, "mixed": False, "only": False,
    }  # fmt: skip
    lr, act, n, *_ = differing
    assert (lr.kinds, act.kinds) == ([0.01, 0.1, 1.0], ["relu", "tanh"])
    assert dict(n.values) == {0: "[1, 2]", 1: "[1]", 2: "[1, 2]"}


def made(count: int) -> str:
    document, found = report_stories.sweep(count)
    return page(report.make(document, found, "best_val_acc", False, report_stories.DAY))


def test_every_run_has_a_row_that_its_curve_and_its_dots_lead_to() -> None:
    body = made(40)
    tree = ElementTree.fromstring(body[body.index("<main>") : body.index("</body>")])
    rows = {element.get("id") for element in tree.iter("tr") if element.get("id")}
    led = {str(element.get("href"))[1:] for element in tree.iter("a") if str(element.get("href")).startswith("#")}
    assert rows == {f"run-{index}" for index in range(40)}
    assert led == rows - {"run-7", "run-37", "run-38", "run-39"}, "what failed or waits has no value yet"


def test_a_page_of_200_runs_stays_small_enough_to_mail() -> None:
    assert len(made(200).encode()) < 2_500_000


def test_names_and_values_of_a_list_are_text_and_nothing_else() -> None:
    document, found = report_stories.hostile_sweep()
    body = page(report.make(document, found, "best_val_acc", False, report_stories.DAY))
    assert "<img" not in body
    assert body.count("<script") == 0


def test_the_verb_sorts_by_the_best_score_and_writes_the_page_from_the_store(desk: Desk) -> None:
    run = sweep(desk)["run"]
    store = desk.store(run)
    for index, accuracy in ((0, 0.8), (1, 0.9)):
        store.put_json(LAYOUT.queue_claim(index, 1), {"instance": "i-1", "time": "2026-11-21T00:00:00Z"})
        metrics = {"val_acc": accuracy - 0.1, "best_val_acc": accuracy}
        told = {"step": 20, "steps_total": 20, "loss": 0.4, "metrics": metrics}
        store.put_json(f"{LAYOUT.entry(index)}/status.json", {"phase": "training", "progress": told})
    lines = [{"step": step, "val_acc": step / 40} for step in (10, 20)]
    body = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    store.put_bytes(f"{LAYOUT.entry(0)}/{LAYOUT.metrics}", body)
    store.put_bytes(f"{LAYOUT.entry(1)}/{LAYOUT.progress('i-1')}", body)  # a trainer that writes no metrics file
    seen = desk.good("sweep", "report", "--html", "out.html")
    assert (seen["metric"], seen["smallest"]) == ("best_val_acc", False)
    assert [one["index"] for one in seen["entries"]] == [1, 0]
    html = (desk.folder / "out.html").read_text()
    assert html.count('<title>run 1: hidden_nodes=[30, 50, 70]') >= 3
    assert "Learning curves: val_acc" in html and "val_acc over the steps of 2 runs" in html
    (desk.folder / "notes.html").write_text("mine")
    refused = desk.run("sweep", "report", "--html", "notes.html")
    assert refused.exit_code == ExitCode.USAGE
    assert (desk.folder / "notes.html").read_text() == "mine"
