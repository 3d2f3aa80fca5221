"""Every region that the SDK knows, but for secret partitions, is one for us: names, zones, ARNs and host names."""

from __future__ import annotations

import re

import botocore.session
import pytest

from spotheal.agent.aws import imds
from spotheal.agent.protocol import instance_config, names
from spotheal.agent.protocol.job import parse_job
from spotheal.fleet.files import places
from spotheal.fleet.run.session import Session
from spotheal.fleet.status import shortage

BOTOCORE = botocore.session.get_session()
PARTITIONS = ("aws", "aws-cn", "aws-us-gov", "aws-eusc")
REGIONS = [region for partition in PARTITIONS for region in BOTOCORE.get_available_regions("ec2", partition)]


@pytest.mark.parametrize("region", REGIONS)
def test_a_region_of_the_sdk_is_a_region(region: str) -> None:
    assert region == Session(region).settle_region()
    job = {"name": "j", "repository": "https://example.org/r.git", "command": ["x"], "region": region}
    assert region == parse_job({"job": job}).job.region
    assert re.fullmatch(instance_config._RUN_PATTERNS["region"], region)
    assert all(
        re.fullmatch(imds._IDENTITY_FIELDS[field][1], text)
        for field, text in (("region", region), ("zone", f"{region}a"))
    )
    assert places.ZONE.fullmatch(f"{region}b")
    assert (f"{region}c",) == shortage.zones_in(f"c5.large, ami-1, Linux/UNIX, {region}c: no capacity")


@pytest.mark.parametrize("region", REGIONS)
def test_arns_and_host_names_are_those_of_the_regions_partition(region: str) -> None:
    partition = BOTOCORE.get_partition_for_region(region)
    resolver = BOTOCORE.get_component("endpoint_resolver")
    assert (partition, resolver.get_partition_dns_suffix(partition)) == (
        names.partition_of(region), names.dns_suffix(region),
    )  # fmt: skip
