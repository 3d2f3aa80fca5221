"""What an account needs before its first instance, where moto has no answer or is too kind.

Service quotas, the price list, public parameters of machine images, AWS's own policy for spot fleets; and IAM that is
eventually consistent: a role or profile made a moment ago cannot be used yet.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moto.ec2.models import ec2_backends
from moto.iam.models import SERVICE_NAME_CONVERSION, AWSManagedPolicy, iam_backends
from moto.secretsmanager.models import secretsmanager_backends

from spotheal.fleet.account import service_roles
from spotheal.fleet.account.roles import INLINE_CHARACTERS_MAX
from spotheal.fleet.rehearsal.ec2.spotmarket import on_demand_price
from spotheal.fleet.rehearsal.ec2.world import World

JsonAnswer = tuple[int, dict[str, Any]]
MANAGED_CHARACTERS_MAX = 6_144  # of a managed policy
IAM_SECONDS = 3.0  # 10 and more at AWS
BUCKET_SECONDS = 1.5  # until a new bucket may be changed
FLEET_POLICY = "AmazonEC2SpotFleetTaggingRole"
BATCH_POLICIES = ("AmazonEC2ContainerServiceforEC2Role", "AmazonECSTaskExecutionRolePolicy")
QUOTAS = {  # an account in use; a new one has 0 of all but the last
    "L-3819A6DF": ("All G and VT Spot Instance Requests", 64.0),
    "L-7212CCBC": ("All P4, P3 and P2 Spot Instance Requests", 0.0),
    "L-C4BD4855": ("All P5 Spot Instance Requests", 0.0),
    "L-34B43A08": ("All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests", 256.0),
}
_DEEP_LEARNING = "/aws/service/deeplearning/ami/"
_UBUNTU = "/aws/service/canonical/ubuntu/server/"
_IMAGES = (
    *(f"{_DEEP_LEARNING}x86_64/oss-nvidia-driver-gpu-pytorch-{torch}-{system}/latest/ami-id"
      for torch in ("2.7", "2.9", "2.10") for system in ("amazon-linux-2023", "ubuntu-22.04", "ubuntu-24.04")
      if (torch, system) not in (("2.7", "ubuntu-24.04"), ("2.10", "ubuntu-22.04"))),
    f"{_DEEP_LEARNING}x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
    f"{_DEEP_LEARNING}arm64/oss-nvidia-driver-gpu-pytorch-2.10-ubuntu-24.04/latest/ami-id",
    f"{_UBUNTU}22.04/stable/current/amd64/hvm/ebs-gp2/ami-id",
    f"{_UBUNTU}24.04/stable/current/amd64/hvm/ebs-gp3/ami-id",
)  # fmt: skip

# moto gives AWS's own roles other names than AWS.
SERVICE_NAME_CONVERSION.update(
    {service.split(".")[0]: name.removeprefix("AWSServiceRoleFor") for service, name in service_roles.ROLES.items()}
)


@dataclass
class Account:
    """`quotas` by code, to be changed by a scenario. `strict`: roles, profiles, keys and images must be there to be
    used."""

    world: World
    strict: bool = False
    quotas: dict[str, tuple[str, float]] = field(default_factory=lambda: dict(QUOTAS))
    _seen: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        role_names = {role.name for role in self._iam.roles.values()}
        for service, name in service_roles.ROLES.items():
            if not self.strict and name not in role_names:  # this account has had spot instances before
                self._iam.create_service_linked_role(service, "", "")
        date = "2017-12-27T18:41:34+00:00"
        document = {"Version": "2012-10-17", "Statement": []}
        data = {"DefaultVersionId": "v1", "Path": "/service-role/", "CreateDate": date, "UpdateDate": date,
                "Document": document}  # fmt: skip
        for name in (FLEET_POLICY, *BATCH_POLICIES):
            policy = AWSManagedPolicy.from_data(name, self.world.account, "us-east-1", data)
            self._iam.managed_policies[policy.arn] = policy

        self.world.images |= {str(self._image(name)["Value"]): name for name in _IMAGES}
        self._open_default_group()

    def _open_default_group(self) -> None:
        """AWS's default security group lets its own members in (VPC User Guide, "Default security groups"); moto's is
        closed."""
        ec2 = ec2_backends[self.world.account][self.world.region]
        group = next(
            candidate for groups in ec2.groups.values() for candidate in groups.values() if candidate.name == "default"
        )
        ec2.authorize_security_group_ingress(group.id, "-1", "", "", [], source_groups=[{"GroupId": group.id}])

    @property
    def _iam(self) -> Any:
        return iam_backends[self.world.account]["aws"]

    def be_strict(self) -> None:
        """As an account in which nobody has launched anything yet: AWS's own roles are not there either."""
        self.strict = True
        names = service_roles.ROLES.values()
        for role in [candidate for candidate in self._iam.roles.values() if candidate.name in names]:
            del self._iam.roles[role.id]

    # ------------------------------------------------------------------------------------------------ services by JSON
    def answer(self, target: str, body: bytes) -> JsonAnswer | None:
        """The answer to a call of a JSON service (`X-Amz-Target`), None where moto may answer it."""
        operation = target.rpartition(".")[2]
        handlers: dict[str, Callable[[Mapping[str, Any]], JsonAnswer | None]] = {
            "ServiceQuotasV20190624.GetServiceQuota": self._quota,
            "ServiceQuotasV20190624.ListServiceQuotas": self._all_quotas,
            "ServiceQuotasV20190624.RequestServiceQuotaIncrease": self._raise_quota,
            "AWSPriceListService.GetProducts": self._products,
            "AmazonSSM.GetParameter": self._parameter,
            "AmazonSSM.GetParametersByPath": self._parameters,
            "secretsmanager.CreateSecret": self._create_secret,
            "secretsmanager.PutSecretValue": self._secret,
            "secretsmanager.GetSecretValue": self._secret,
            "secretsmanager.DeleteSecret": self._secret,
        }
        handler = handlers.get(target)
        if handler is None:
            return None
        if self.world.faults.throttled(operation):
            return 400, {"__type": "ThrottlingException", "message": "Rate exceeded"}
        return handler(json.loads(body or b"{}"))

    def _quota(self, params: Mapping[str, Any]) -> JsonAnswer:
        code = params.get("QuotaCode", "")
        if params.get("ServiceCode") != "ec2" or code not in self.quotas:
            return 400, {"__type": "NoSuchResourceException", "message": "The specified quota does not exist."}
        return 200, {"Quota": self._shaped(code)}

    def _all_quotas(self, params: Mapping[str, Any]) -> JsonAnswer:
        return 200, {"Quotas": [self._shaped(code) for code in self.quotas]}

    def _raise_quota(self, params: Mapping[str, Any]) -> JsonAnswer:
        """Granted at once, which takes AWS minutes to days."""
        name, _ = self.quotas[params["QuotaCode"]]
        self.quotas[params["QuotaCode"]] = name, float(params["DesiredValue"])
        return 200, {"RequestedQuota": {"Id": "rehearsal", "Status": "APPROVED", "QuotaCode": params["QuotaCode"]}}

    def _shaped(self, code: str) -> dict[str, Any]:
        name, value = self.quotas[code]
        return {"ServiceCode": "ec2", "QuotaCode": code, "QuotaName": name, "Value": value, "Adjustable": True}

    def _products(self, params: Mapping[str, Any]) -> JsonAnswer:
        kind = next(
            (
                str(condition["Value"])
                for condition in params.get("Filters", [])
                if condition["Field"] == "instanceType"
            ),
            "",
        )
        if not kind:
            return 200, {"PriceList": [], "FormatVersion": "aws_v1"}
        price = {"priceDimensions": {"x": {"unit": "Hrs", "pricePerUnit": {"USD": f"{on_demand_price(kind):.10f}"}}}}
        product = {"product": {"attributes": {"instanceType": kind}}, "terms": {"OnDemand": {"x": price}}}
        return 200, {"PriceList": [json.dumps(product)], "FormatVersion": "aws_v1"}

    def _parameter(self, params: Mapping[str, Any]) -> JsonAnswer | None:
        name = params.get("Name", "")
        if not name.startswith((_DEEP_LEARNING, _UBUNTU)):
            return None
        if name not in _IMAGES:
            return 400, {"__type": "ParameterNotFound", "message": ""}
        return 200, {"Parameter": self._image(name)}

    def _parameters(self, params: Mapping[str, Any]) -> JsonAnswer | None:
        """Ten a page, as AWS has it."""
        path = str(params.get("Path", "")).rstrip("/") + "/"
        if not path.startswith((_DEEP_LEARNING, _UBUNTU)):
            return None
        names = sorted(name for name in _IMAGES if name.startswith(path) and params.get("Recursive"))
        start = int(params.get("NextToken") or 0)
        end = start + int(params.get("MaxResults") or 10)
        token = {"NextToken": str(end)} if end < len(names) else {}
        return 200, {"Parameters": [self._image(name) for name in names[start:end]], **token}

    def _image(self, name: str) -> dict[str, Any]:
        value = f"ami-0{zlib.crc32(name.encode()):08x}{zlib.crc32(name[::-1].encode()):08x}"
        return {"Name": name, "Type": "String", "Value": value, "Version": 1, "DataType": "text"}

    def _create_secret(self, params: Mapping[str, Any]) -> JsonAnswer | None:
        """moto takes one that is scheduled for deletion for one that is there."""
        secret = self._secrets.get(params.get("Name", ""))
        if secret is None or not secret.is_deleted():
            return None
        message = "You can't create this secret because a secret with this name is already scheduled for deletion."
        return 400, {"__type": "InvalidRequestException", "message": message}

    def _secret(self, params: Mapping[str, Any]) -> JsonAnswer | None:
        """moto says 404 of an unknown one, and changes and deletes one that is scheduled for deletion."""
        secret = self._secrets.get(params.get("SecretId", ""))
        if params.get("ForceDeleteWithoutRecovery"):
            return None
        if secret is None:
            unknown = "Secrets Manager can't find the specified secret."
            return 400, {"__type": "ResourceNotFoundException", "message": unknown}
        if secret.is_deleted():
            marked = "You can't perform this operation on the secret because it was marked for deletion."
            return 400, {"__type": "InvalidRequestException", "message": marked}
        return None

    @property
    def _secrets(self) -> Any:
        """moto's, found by name or ARN."""
        return secretsmanager_backends[self.world.account][self.world.region].secrets

    # ------------------------------------------------------------------------------------------------------------- IAM
    def profile_fault(self, profile: Mapping[str, Any]) -> str | None:
        """Why no instance can be launched with this profile (yet); None where one can."""
        name = str(profile.get("Name") or str(profile.get("Arn", "")).rpartition("/")[2])
        if not self.strict or not name:
            return None
        known = {candidate.name: candidate for candidate in self._iam.instance_profiles.values()}
        if name not in known or not known[name].roles or self._is_young(f"profile {name}"):
            return f"Value ({name}) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name"
        return None

    def image_fault(self, image: str) -> str:
        """Why nothing is launched from `image`; "" if it is there. EC2 looks up `resolve:ssm:…` itself."""
        if not self.strict or image in self.world.images or not image.startswith("ami-"):
            return ""
        return f"The image id '[{image}]' does not exist"

    def bucket_fault(self, method: str, path: str, query: str) -> tuple[int, bytes] | None:
        """S3's answer to who changes a bucket made a moment ago (terraform-provider-aws issues 7628 and 11795)."""
        bucket, _, key = path.strip("/").partition("/")
        if not self.strict or method != "PUT" or key:
            return None
        age = self.world.moment() - self._seen.setdefault(f"bucket {bucket}", self.world.moment())
        if not query.startswith(("publicAccessBlock", "encryption")) or age >= BUCKET_SECONDS:
            return None
        if age < BUCKET_SECONDS / 2:
            status, code, message = 404, "NoSuchBucket", "The specified bucket does not exist"
        else:
            status, code, message = 409, "OperationAborted", (
                "A conflicting conditional operation is currently in progress against this resource. Please try again."
            )  # fmt: skip
        return status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()

    def role_fault(self, arn: str) -> str | None:
        if not self.strict:
            return None
        name = arn.rpartition("/")[2]
        if not any(role.name == name for role in self._iam.roles.values()) or self._is_young(f"role {name}"):
            return "Parameter: SpotFleetRequestConfig.IamFleetRole is invalid."
        return None

    def _is_young(self, thing: str) -> bool:
        return self.world.moment() - self._seen.setdefault(thing, self.world.moment()) < IAM_SECONDS

    def note_iam(self, action: str, name: str) -> None:
        """IAM made something: its age counts from now."""
        kind = {"CreateRole": "role", "AddRoleToInstanceProfile": "profile"}.get(action)
        if kind and re.fullmatch(r"[\w+=,.@-]+", name):
            self._seen[f"{kind} {name}"] = self.world.moment()

    def size_fault(self, action: str, form: Mapping[str, str]) -> str:
        """Why IAM refuses a policy: longer than it takes, white space not counted. moto takes any size. Source: IAM
        user guide, "IAM and AWS STS quotas"."""
        size = len(re.sub(r"\s", "", form.get("PolicyDocument", "")))
        if action == "CreatePolicy" and size > MANAGED_CHARACTERS_MAX:
            return f"Cannot exceed quota for PolicySize: {MANAGED_CHARACTERS_MAX}"
        if action == "PutRolePolicy":
            role = next(
                (candidate for candidate in self._iam.roles.values() if candidate.name == form.get("RoleName")), None
            )
            sizes = dict(role.policies) if role else {}
            sizes.pop(form.get("PolicyName", ""), None)
            texts = [text if isinstance(text, str) else json.dumps(text) for text in sizes.values()]
            if size + sum(len(re.sub(r"\s", "", text)) for text in texts) > INLINE_CHARACTERS_MAX:
                name = form.get("RoleName", "")
                return f"Maximum policy size of {INLINE_CHARACTERS_MAX} bytes exceeded for role {name}"
        return ""

    def check_launch(self, spec: Mapping[str, Any]) -> str | None:
        return self.profile_fault(spec.get("IamInstanceProfile") or {})
