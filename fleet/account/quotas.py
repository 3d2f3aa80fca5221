"""Spot quotas, in vCPUs per family of instance types: read first, because a new account may run no GPU at all.

Codes as in Service Quotas' list for EC2 ("… Spot Instance Requests"); each region has its own values.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.errors import PermissionDenied, SpothealError
from spotheal.fleet.account.types import InstanceType

if TYPE_CHECKING:
    from spotheal.fleet.run.session import Session

_FAMILIES: tuple[tuple[str, str, str], ...] = (  # pattern of the type's name, code, AWS's name
    (r"(g|gr|vt)\d.*", "L-3819A6DF", "All G and VT Spot Instance Requests"),
    (r"p[234].*", "L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
    (r"p5.*", "L-C4BD4855", "All P5 Spot Instance Requests"),
    (r"trn.*", "L-6B0D517C", "All Trn Spot Instance Requests"),
    (r"inf.*", "L-B5D1601B", "All Inf Spot Instance Requests"),
    (r"dl.*", "L-85EED4F7", "All DL Spot Instance Requests"),
    (r"f\d.*", "L-88CF9481", "All F Spot Instance Requests"),
    (r"x.*", "L-E3A00192", "All X Spot Instance Requests"),
    (r"(a|c|d|h|i|m|r|t|z)\d.*|(im|is|mac)\d.*", "L-34B43A08",
     "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests"),
)  # fmt: skip


@dataclass(frozen=True)
class Quota:
    """`vcpus` is None if it could not be read."""

    code: str
    name: str
    vcpus: float | None


def quota_of(instance_type: str) -> tuple[str, str] | None:
    """Code and name of the quota of a type; None for a family that this list does not know."""
    return next(((code, name) for pattern, code, name in _FAMILIES if re.fullmatch(pattern, instance_type)), None)


def read(session: Session, codes: Iterable[tuple[str, str]]) -> tuple[dict[str, Quota], list[str]]:
    """Quotas by code, and a note for each that could not be read: an unknown quota refuses no type."""
    quotas: dict[str, Quota] = {}
    notes: list[str] = []
    for code, name in dict.fromkeys(codes):
        value: float | None = None
        try:
            with translated(f'read the quota "{name}"'):
                answer = session.client("service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode=code)
                value = float(answer["Quota"]["Value"])
        except PermissionDenied as error:
            if not error.code:
                raise
            notes.append(f'the quota "{name}" was not checked: servicequotas:GetServiceQuota is not allowed')
        except SpothealError as error:
            notes.append(f'the quota "{name}" was not checked: {error.message}')
        quotas[code] = Quota(code, name, value)
    return quotas, notes


def allows(quotas: dict[str, Quota], instance_type: InstanceType) -> bool:
    code_and_name = quota_of(instance_type.name)
    quota = quotas.get(code_and_name[0]) if code_and_name else None
    return quota is None or quota.vcpus is None or instance_type.vcpus <= quota.vcpus


def command(code: str, vcpus: int, region: str) -> str:
    """The command that asks AWS for more."""
    words = ["aws", "service-quotas", "request-service-quota-increase", "--service-code", "ec2", "--quota-code", code,
             "--desired-value", str(vcpus), "--region", region]  # fmt: skip
    return shlex.join(words)
