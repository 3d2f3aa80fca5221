"""Values of the right form that make no sense; and faults one by one, for programs."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotheal.agent.protocol.errors import ConfigError
from spotheal.fleet.account.prices import Price, price_notes
from spotheal.fleet.files import faults
from spotheal.fleet.files.values import value_faults, value_warnings

NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"SpotPrice": "0"}, "SpotPrice"),
        ({"SpotPrice": "-1"}, "SpotPrice"),
        ({"SpotPrice": "cheap"}, "SpotPrice"),
        ({"SpotPrice": "nan"}, "SpotPrice"),
        ({"SpotPrice": "inf"}, "SpotPrice"),
        ({"LaunchSpecifications": [{}, {"SpotPrice": ""}]}, "LaunchSpecifications[1].SpotPrice"),
        ({"LaunchTemplateConfigs": [{"Overrides": [{"SpotPrice": "$1"}]}]},
         "LaunchTemplateConfigs[0].Overrides[0].SpotPrice"),
        ({"ValidUntil": "2026-11-20T23:59:59Z"}, "ValidUntil"),
        ({"ValidUntil": "2026-11-20T23:59:59"}, "ValidUntil"),
        ({"ValidUntil": "tomorrow"}, "ValidUntil"),
        ({"ValidFrom": "2027-01-02T00:00:00Z", "ValidUntil": "2027-01-01T00:00:00Z"}, "ValidUntil"),
        ({"LaunchSpecifications": [{"SecurityGroups": [{"GroupId": "default"}]}]},
         "LaunchSpecifications[0].SecurityGroups[0].GroupId"),
    ],
)  # fmt: skip
def test_each_names_its_place_and_has_a_cure(document: dict[str, Any], place: str) -> None:
    (fault,) = value_faults(document, NOW)
    found, _, rest = fault.partition(": ")
    assert found == place and "; " in rest


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"LaunchSpecifications": [{"SecurityGroups": 3}, {"SecurityGroups": "x"}, {"SecurityGroups": [[]]}]},
        {"SpotPrice": "0.25", "ValidUntil": "2026-11-21T00:00:01Z"},
        {"LaunchSpecifications": [{"SecurityGroups": [{"GroupId": "<SECURITY_GROUP_ID>"}, {"GroupName": "x"}]}]},
        {"LaunchSpecifications": [{"SecurityGroups": [{"GroupId": "sg-0123456789abcdef0"}], "SpotPrice": "1"}]},
    ],
)
def test_what_makes_sense_passes(document: dict[str, Any]) -> None:
    assert list(value_faults(document, NOW)) == []


def test_a_price_in_cents_is_a_warning_and_refuses_nothing() -> None:
    assert list(value_faults({"SpotPrice": "300"}, NOW)) == []
    (warning,) = value_warnings({"SpotPrice": "300"})
    assert "meant in cents?" in warning


@pytest.mark.parametrize(("price", "says"), [("0.05", "the fleet will wait"), ("99", "10 times the price on demand")])
def test_a_price_is_held_against_todays(price: str, says: str) -> None:
    (note,) = price_notes({"SpotPrice": price}, (Price("g5.xlarge", "us-west-2a", 0.30, 1.0),))
    assert says in note
    assert price_notes({"SpotPrice": "0.5"}, (Price("g5.xlarge", "us-west-2a", 0.30, 1.0),)) == []


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_as_price_or_time_has_a_fault_or_none_and_never_crashes(price: str, time: str) -> None:
    found = list(value_faults({"SpotPrice": price, "ValidUntil": time}, NOW))
    assert len(found) <= 2


def test_a_day_of_validity_left_is_enough() -> None:
    assert list(value_faults({"ValidUntil": (NOW + timedelta(days=1)).isoformat()}, NOW)) == []


def test_faults_are_told_apart_by_file_place_message_and_cure() -> None:
    error = ConfigError(
        "fleet.json:3:7: a comma is missing; add ,\n    {\"a\": 1\n          ^\n"
        "fleet.json: TargetCapacity: must be 1, is 2\n"
        "fleet.json: the placeholder <AMI_ID> is still in A.ImageId, B.ImageId; write the value\n"
        "job.toml: [job] name: is required\n"
        "user data would be too large",
        next_step="correct them",
    )
    found = faults.listed(error, ("fleet.json", "job.toml"))
    assert [(one["file"], one["place"], one["cure"]) for one in found] == [
        ("fleet.json", "3:7", "add ,"),
        ("fleet.json", "TargetCapacity", "correct them"),
        ("fleet.json", "A.ImageId, B.ImageId", "write the value"),
        ("job.toml", "[job] name", "correct them"),
    ]
    assert found[0]["message"].startswith("a comma is missing\n    {")
    assert found[-1]["message"].endswith("user data would be too large")
