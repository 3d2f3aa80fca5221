"""Machine images: the newest Deep Learning AMI with PyTorch, or plain Ubuntu, by AWS's public SSM parameters.

Parameter names as in the DLAMI developer guide, "Finding the ID of a DLAMI":
/aws/service/deeplearning/ami/<architecture>/<AMI's name without "deep learning ami">/latest/ami-id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import NotFound

if TYPE_CHECKING:
    from spotheal.fleet.run.session import Session

_DEEP_LEARNING = "/aws/service/deeplearning/ami/x86_64"
_PYTORCH = re.compile(r".*/oss-nvidia-driver-gpu-pytorch-(\d+)\.(\d+)-ubuntu-(\d+)\.(\d+)/latest/ami-id")
_UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
# `supported_ec2_instances` of the release notes of "Deep Learning OSS Nvidia Driver AMI GPU PyTorch" (x86_64): the open
# kernel modules need a Turing GPU or a newer one, so neither P3 (V100), P2 (K80) nor G3 (M60); and whole GPUs, not G6f.
# Only the notes of the Base AMI, which has no PyTorch, name G7e and P6-B300.
DEEP_LEARNING_FAMILIES = ("g4dn", "g5", "g6", "gr6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200")
CPU_FAMILIES = ("c6a", "c6i", "c7a", "c7i", "m6a", "m6i", "m7a", "m7i", "r6a", "r6i", "r7a", "r7i")


@dataclass(frozen=True)
class Image:
    id: str
    parameter: str
    says: str
    families: tuple[str, ...]  # of instance types that it supports
    user: str = "ubuntu"


def deep_learning(session: Session) -> Image:
    """The image with the newest PyTorch, on the newest Ubuntu that has it. NotFound if the region has none."""
    newest: tuple[tuple[int, ...], str, str] | None = None
    with translated("list the Deep Learning AMIs (SSM parameters)"):
        pages = session.client("ssm").get_paginator("get_parameters_by_path")
        for page in pages.paginate(Path=_DEEP_LEARNING, Recursive=True):
            for parameter in page["Parameters"]:
                if match := _PYTORCH.fullmatch(parameter["Name"]):
                    version = tuple(int(part) for part in match.groups())
                    newest = max(newest or (version, "", ""), (version, parameter["Name"], parameter["Value"]))
    if newest is None:
        raise NotFound(
            f"region {session.region} publishes no Deep Learning AMI with PyTorch",
            next_step="name your own image with --image ami-…, or choose another --region",
        )
    (torch, minor, year, month), name, image = newest
    says = f"Deep Learning AMI, PyTorch {torch}.{minor}, Ubuntu {year}.{month:02d}, open NVIDIA driver: the newest"
    return Image(image, name, says, DEEP_LEARNING_FAMILIES)


def ubuntu(session: Session) -> Image:
    """Plain Ubuntu, for jobs without a GPU: it has Python and git, but no torch."""
    with translated("read the newest Ubuntu image (SSM parameter)"):
        answer = session.client("ssm").get_parameter(Name=_UBUNTU)
    return Image(answer["Parameter"]["Value"], _UBUNTU, "Ubuntu 24.04, plain: the newest", CPU_FAMILIES)
