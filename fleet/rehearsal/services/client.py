"""boto3's EC2 client over the rule book, without HTTP: for the simulations, a thousand calls in a blink.

`InMemoryS3` (in `objects`) is its counterpart for the store. Errors are botocore's, as with a real client.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterator
from typing import Any

from botocore import xform_name
from botocore.exceptions import ClientError, ConnectionClosedError, ParamValidationError

from spotheal.fleet.rehearsal.ec2.rulebook import OPERATIONS, ApiError, ReplyLost, Rulebook
from spotheal.fleet.rehearsal.services.objects import InMemoryS3

__all__ = ["InMemoryEc2", "InMemoryS3"]

_METHODS = {xform_name(operation): operation for operation in (*OPERATIONS, "GetConsoleOutput")}
_RESULT_KEYS = {
    "describe_volumes": "Volumes",
    "describe_snapshots": "Snapshots",
    "describe_instances": "Reservations",
    "describe_instance_status": "InstanceStatuses",
    "describe_tags": "Tags",
    "describe_spot_instance_requests": "SpotInstanceRequests",
    "describe_instance_type_offerings": "InstanceTypeOfferings",
    "describe_spot_price_history": "SpotPriceHistory",
    "describe_spot_fleet_requests": "SpotFleetRequestConfigs",
    "describe_spot_fleet_instances": "ActiveInstances",
    "describe_launch_templates": "LaunchTemplates",
    "describe_launch_template_versions": "LaunchTemplateVersions",
    "describe_fleets": "Fleets",
    "describe_images": "Images",
}


class InMemoryEc2:
    """A client whose calls come from `caller` (an instance id, or None for the operator).

    With `validate` the parameters are checked against botocore's service model, which costs half a second once.
    botocore's retries are left out: one call here is one call there.
    """

    class exceptions:
        ClientError = ClientError

    def __init__(self, rulebook: Rulebook, caller: str | None = None, validate: bool = False) -> None:
        self._rulebook = rulebook
        self._caller = caller
        self._validate = validate

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
        if name not in _METHODS:
            raise AttributeError(name)
        return functools.partial(self._call, _METHODS[name])

    def get_paginator(self, name: str) -> Paginator:
        if name not in _RESULT_KEYS:
            raise ValueError(f"Operation {name} cannot be paginated")
        return Paginator(getattr(self, name))

    def can_paginate(self, name: str) -> bool:
        return name in _RESULT_KEYS

    def _call(self, operation: str, **params: Any) -> dict[str, Any]:
        if self._validate:
            check(operation, params)
        if operation == "RunInstances" and params.get("UserData"):  # botocore encodes it, for this call only
            data = params["UserData"]
            raw = data.encode() if isinstance(data, str) else data
            params["UserData"] = base64.b64encode(raw).decode()
        try:
            answer = self._rulebook.call(operation, params, self._caller)
        except ApiError as error:
            raise client_error(operation, error.code, error.message, error.status) from error
        except ReplyLost as lost:
            raise ConnectionClosedError(endpoint_url="in-memory") from lost
        if "Output" in answer:  # of GetConsoleOutput: botocore decodes it
            answer["Output"] = base64.b64decode(answer["Output"]).decode("utf-8", "replace")
        return {**answer, "ResponseMetadata": {"HTTPStatusCode": 200, "RequestId": "in-memory", "HTTPHeaders": {}}}


class Paginator:
    """All pages of a describe; `page_size` becomes MaxResults as with botocore."""

    def __init__(self, call: Callable[..., dict[str, Any]], token: str = "NextToken") -> None:
        self._call, self._token = call, token

    def paginate(self, PaginationConfig: dict[str, Any] | None = None, **params: Any) -> Iterator[dict[str, Any]]:
        if size := (PaginationConfig or {}).get("PageSize"):
            params["MaxResults"] = size
        while True:
            page = self._call(**params)
            yield page
            if not page.get("NextToken"):
                return
            params["NextToken"] = page["NextToken"]


def client_error(operation: str, code: str, message: str, status: int) -> ClientError:
    metadata: Any = {"HTTPStatusCode": status, "RequestId": "in-memory", "HTTPHeaders": {}, "RetryAttempts": 0}
    return ClientError({"Error": {"Code": code, "Message": message}, "ResponseMetadata": metadata}, operation)


@functools.lru_cache(maxsize=1)
def service_model() -> Any:
    """botocore's model of the EC2 API."""
    import botocore.loaders
    import botocore.model

    return botocore.model.ServiceModel(botocore.loaders.Loader().load_service_model("ec2", "service-2"), "ec2")


def check(operation: str, params: dict[str, Any]) -> None:
    """Raise botocore's ParamValidationError where a real client would."""
    from botocore.validate import ParamValidator

    report = ParamValidator().validate(params, service_model().operation_model(operation).input_shape)
    if report.has_errors():
        raise ParamValidationError(report=report.generate_report())
