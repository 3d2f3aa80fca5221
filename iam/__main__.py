"""Print a policy: `python -m spotheal.iam instance-role --account 123456789012 --region us-west-2`."""

from __future__ import annotations

import argparse
import json
import sys

from spotheal.agent.protocol.names import StoreUrl, default_bucket
from spotheal.iam import policies


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m spotheal.iam", description="Print an IAM document as JSON.")
    names = ("instance-role", "instance-trust", "fleet-role", "fleet-trust", "operator",
             "operator-store", "operator-efs", "operator-batch", "administrator", "trainer-trust")  # fmt: skip
    parser.add_argument("document", choices=names)
    parser.add_argument("--account", required=True, help="12 digits")
    parser.add_argument("--region", required=True)
    parser.add_argument("--store", default="", help="s3://bucket/prefix (default: bucket spotheal-<account>-<region>)")
    parser.add_argument("--run", default="", help="allow this one run only (default: any run of the account)")
    parser.add_argument("--instance-role", default="spotheal-instance", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--fleet-role", default=policies.Scope.fleet_role, metavar="NAME", help="default: %(default)s")
    parser.add_argument("--kms-key", default="", metavar="ARN", help="customer key that volumes are encrypted with")
    parser.add_argument("--topic", default="", metavar="ARN", help="SNS topic of [notify] (default: spotheal*)")
    parser.add_argument("--job", default="", help="whose secrets below /spotheal may be read (default: any job's)")
    parser.add_argument("--secret", action="append", default=[], metavar="REFERENCE", help="one that lies elsewhere")
    parser.add_argument("--no-delete", action="store_true", help="leave deleting old volumes and snapshots to people")
    given = parser.parse_args(arguments)
    try:
        store = StoreUrl.parse(given.store or f"s3://{default_bucket(given.account, given.region)}")
    except ValueError as error:
        parser.error(f"--store: {error}")
    scope = policies.Scope(
        given.account, given.region, store, given.run, given.instance_role, given.fleet_role,
        topic=given.topic, kms_key=given.kms_key, job=given.job, secrets=tuple(given.secret),
    )  # fmt: skip
    document = {
        "instance-role": lambda: policies.instance_role(scope, may_delete=not given.no_delete),
        "instance-trust": lambda: policies.trust("ec2.amazonaws.com"),
        "fleet-role": lambda: policies.fleet_role(scope),
        "fleet-trust": lambda: policies.trust("spotfleet.amazonaws.com"),
        "trainer-trust": lambda: policies.trainer_trust(scope),
        "operator": lambda: policies.operator(scope),
        "operator-store": lambda: policies.operator_of_store(scope),
        "operator-efs": lambda: policies.operator_of_file_systems(scope),
        "operator-batch": lambda: policies.operator_of_batch(scope),
        "administrator": lambda: policies.administrator(scope),
    }[given.document]()
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
