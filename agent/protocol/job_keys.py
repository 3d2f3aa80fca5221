"""Every key of job.toml: its default, what it may be, what it says.

The parser, `fleetctl init` and docs/job-toml.md are made from this one table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spotheal.agent.protocol.job_values import (
    Check,
    amount,
    argv,
    argvs,
    boolean,
    duration,
    gpus,
    host_keys,
    inside,
    insides,
    instance_types,
    integer,
    machine_range,
    matching,
    memory,
    mount,
    one_of,
    policy,
    python,
    rate,
    reference,
    results,
    store,
    text,
    volume_type,
)
from spotheal.agent.protocol.names import JOB_NAME, REGION

REQUIRED: Any = object()


@dataclass(frozen=True)
class Key:
    """One key of job.toml. Where `ready` is False only the default is accepted: better refused than ignored."""

    table: str
    name: str
    default: Any
    check: Check
    says: str
    ready: bool = True


KEYS: tuple[Key, ...] = (
    Key("job", "name", REQUIRED, matching(JOB_NAME.pattern, "1 to 40 of a-z, 0-9 and -"), "the job's name"),
    Key(
        "job",
        "repository",
        REQUIRED,
        text,
        'https or ssh URL; "." carries this checkout\'s commit as a git bundle in the store; in a rehearsal any path',
    ),
    Key(
        "job",
        "revision",
        "",
        matching(r"[A-Za-z0-9._/@{}^~+-]*", "a branch, tag or commit"),
        "branch, tag or commit; `request` pins it to a commit",
    ),
    Key("job", "command", REQUIRED, argv, "the trainer, a list without a shell; ${SPOTHEAL_…} is expanded"),
    Key("job", "resume_command", [], argv, "used once there is something to resume from; default: command"),
    Key(
        "job",
        "setup",
        [],
        argvs,
        "packages and data: commands run first, once per revision, setup and interpreter; see docs/contract.md",
    ),
    Key(
        "job",
        "repository_secret",
        "",
        reference,
        "where a token (https) or a private key (ssh) for the repository lies: ssm:/path or secretsmanager:id",
    ),
    Key("job", "known_hosts", "", host_keys,
        "keys of an ssh repository's host, lines of known_hosts; default: those that this machine knows"),
    Key("job", "directory", "", inside, "folder of the repository in which everything runs"),
    Key(
        "job",
        "region",
        "",
        matching(f"{REGION}|", "a region such as us-west-2"),
        "written by init, so that tomorrow's shell finds the job",
    ),
    Key("job", "python", "", python, "what `python` means; default: the machine image's environment with torch"),
    Key("job", "keep", [], insides, "paths of the working copy that later runs on the same volume find too"),
    Key("job", "submodules", False, boolean, "check out submodules too"),
    Key(
        "job",
        "set_aside_broken",
        True,
        boolean,
        "after two restarts without a step, set saves aside that are surely incomplete",
    ),
    Key("job", "keep_on_failure", "0m", duration, "leave a failed instance up for so long, for debugging"),
    Key(
        "job",
        "nproc_per_node",
        1,
        gpus,
        'ranks a machine, or "gpu" for one a GPU; torchrun is put before a command that does not launch them itself',
    ),
    Key(
        "job",
        "gpus",
        0,
        integer(0, 64),
        "GPUs a machine must have; an instance type that has fewer is not used for the run; 0 = not looked at",
    ),
    Key("job", "gpu_memory_gib", 0, amount, "of each of them, as the card is sold; 0 = any"),
    Key("job", "nodes", "1", machine_range,
        'machines that train together, "2", or at least and at most, "2:4"; needs EFS'),
    Key("job", "nodes_wait", "15m", duration, "how long fewer machines than the least wait for others; then it parks"),
    Key("volume", "name", "", text, "Name tag of the volume; default: spotheal- and the job's name"),
    Key("volume", "size_gib", 100, integer(1, 65536), "size in GiB"),
    Key("volume", "type", "gp3", volume_type, "EBS volume type: gp3, gp2, st1 or sc1"),
    Key("volume", "mount", "/dltraining", mount, "mount point; datasets/ checkpoints/ results/ logs/ lie below it"),
    Key("volume", "filesystem", "xfs", one_of("xfs", "ext4"), "filesystem of a new volume"),
    Key("volume", "snapshot", "", matching(r"(snap-[0-9a-f]+)?", "a snapshot id"), "start from this one (a dataset)"),
    Key("volume", "kms_key", "", matching(r"(arn:aws[\w-]*:kms:[\w-]+:\d{12}:key/[\w-]+)?", "the ARN of a KMS key"),
        "customer key that a new volume is encrypted with; default: the account's key for EBS"),
    Key("volume", "initialization_rate", 100, rate,
        "MiB/s, 100 to 300, at which a volume made from a snapshot is filled; 0 = lazily, which is slow and free"),
    Key("volume", "snapshot_every", "0m", duration, "base snapshots, which make the next move small; 0m = none"),
    Key("volume", "delete_superseded", True, boolean,
        "false: old volumes, the empty first one too, and snapshots stay until `fleetctl clean`"),
    Key(
        "fleet",
        "engine",
        "spot-fleet",
        one_of("spot-fleet", "ec2-fleet"),
        "AWS interface that keeps the capacity; the fleet's file is the same for both",
    ),
    Key("fleet", "harden", True, boolean, "launch template with IMDSv2 required and a hop limit of 1"),
    Key(
        "fleet",
        "on_demand_after",
        "0m",
        duration,
        "an on-demand instance after so long without spot; 0m = never; needs `limits.dollars`",
    ),
    Key(
        "fleet",
        "ssh_from",
        "",
        matching(r"([0-9a-fA-F.:]+(/\d{1,3})?)?", "an address such as 203.0.113.7/32"),
        "from where `request` opens ssh in its security group; default: from nowhere",
    ),
    Key("fleet", "public_key", "", text, "file with the public key that `request` imports as the fleet's KeyName"),
    Key("limits", "failures", 3, integer(1, 100), "failures without a step gained between them that end the run"),
    Key(
        "limits",
        "silent",
        "4h",
        duration,
        "without a step, a line of output or a new checkpoint for so long it hangs, and is started again; 0m = never",
    ),
    Key("limits", "hours", 0, amount, "hours of the run after which it saves and ends; 0 = none"),
    Key("limits", "dollars", 0, amount, "dollars since the request after which it saves and ends; 0 = none"),
    Key(
        "cage",
        "mode",
        "on",
        one_of("on", "calls", "imds", "off"),
        '"on": the trainer in a sandbox, without a way to the instance\'s role; "calls": and all system calls open;'
        ' "imds": "on" with a way to the role; "off": no cage',
    ),
    Key(
        "cage",
        "user",
        "spotheal-trainer",
        matching(r"[a-z_][a-z0-9_-]{0,31}", "a user name"),
        "the cage's own user, made where it is not there; with the cage off, whom the trainer runs as",
    ),
    Key("cage", "trainer_policy", "", policy, "policy file of a narrow role for the caged trainer"),
    Key("store", "url", "", store, "s3://bucket/prefix; default: bucket spotheal-<account>-<region>"),
    Key("store", "results", "", results, "s3://bucket/prefix or efs://fs-id/folder for results; default: the store"),
    Key("batch", "image", "", matching(r"[A-Za-z0-9./:@_-]{0,255}", "a container image"),
        "image of containers, with git and spotheal in it; default: the one that `fleetctl batch image push` makes"),
    Key("batch", "vcpus", 4, integer(1, 192), "vCPUs of a container"),
    Key("batch", "memory_gib", 14.0, memory, "memory of a container; some of its host's is ECS's own"),
    Key("batch", "gpus", 0, integer(0, 16), "GPUs of a container; 0: what `[job] gpus` says"),
    Key("batch", "max_vcpus", 64, integer(1, 100_000), "vCPUs of all containers at once, spot and on demand each"),
    Key("batch", "instance_types", [], instance_types,
        "types or families; default: g4dn, g5, g6 for GPUs, else AWS's choice"),
    Key("batch", "on_demand", True, boolean, "on-demand instances where spot has no capacity"),
    Key("batch", "attempts", 10, integer(1, 10), "how often a host may go away under a container; 10 is AWS's most"),
    Key("batch", "copy_every", "5m", duration, "how often changed checkpoints are copied to the store (without EFS)"),
    Key(
        "notify",
        "webhook",
        "",
        matching(r"(https?://\S+)?", "an http(s) URL"),
        "POSTed JSON with `text` (Slack, Mattermost, Discord's /slack) at ends, interruptions and 80 % of a limit",
    ),
    Key(
        "notify",
        "sns",
        "",
        matching(r"(arn:aws[a-z-]*:sns:[a-z0-9-]+:\d{12}:[A-Za-z0-9_-]{1,256})?", "the ARN of an SNS topic"),
        "the same as text to this topic",
    ),
)
FREE_TABLES = {
    "environment": 'NAME = "value": environment of the trainer',
    "secrets": 'NAME = "ssm:/path" or "secretsmanager:id": fetched on the instance, never logged',
}
