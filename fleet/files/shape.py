"""Checks a SpotFleetRequestConfig against botocore's service model, which is read from its data without a client."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

_UNKNOWN = re.compile(
    r"Unknown parameter in (?P<where>.*?): \"(?P<name>.*?)\", must be one of: (?P<legal>.*)", re.DOTALL
)
_MISSING = re.compile(r"Missing required parameter in (?P<where>.*?): \"(?P<name>.*?)\"")
_TYPE = re.compile(
    r"Invalid type for parameter (?P<where>.*?), value: (?P<value>.*), type: .*, valid types: (?P<legal>.*)", re.DOTALL
)
_TYPE_NAMES = {
    "<class 'str'>": "text",
    "<class 'int'>": "a whole number",
    "<class 'bool'>": "true or false",
    "<class 'dict'>": "an object {…}",
    "<class 'list'>": "a list […]",
    "<class 'tuple'>": "",
    "<class 'float'>": "a number",
    "<class 'decimal.Decimal'>": "",
}
# New types appear faster than botocore is updated: AWS itself refuses an unknown type.
_OPEN_ENUMS = {"InstanceType"}


def known_types() -> frozenset[str]:
    """The instance types that this botocore knows, also retired ones. AWS may have newer ones."""
    return frozenset(input_shape("RunInstances").members["InstanceType"].enum)


@lru_cache(maxsize=4)
def input_shape(operation: str) -> Any:
    """The input of an EC2 operation, from botocore's packaged data; no credentials, region or network are needed."""
    from botocore.loaders import Loader
    from botocore.model import ServiceModel

    model = ServiceModel(Loader().load_service_model("ec2", "service-2"))
    return model.operation_model(operation).input_shape


def fleet_config_faults(document: dict[str, Any]) -> list[str]:
    """What AWS would refuse in `document`: unknown and missing keys, wrong types, unknown values of enumerations."""
    shape = input_shape("RequestSpotFleet").members["SpotFleetRequestConfig"]
    return _shape_faults(document, shape)


def request_faults(operation: str, arguments: dict[str, Any]) -> list[str]:
    """Like `fleet_config_faults`, for the arguments of any EC2 call."""
    return _shape_faults(arguments, input_shape(operation))


def _shape_faults(document: dict[str, Any], shape: Any) -> list[str]:
    from botocore.validate import ParamValidator

    report = ParamValidator().validate(document, shape)
    messages = [_readable(line) for line in report.generate_report().split("\n")] if report.has_errors() else []
    return messages + list(_enum_faults(document, shape, ""))


def _readable(line: str) -> str:
    if match := _UNKNOWN.fullmatch(line):
        legal = match["legal"].split(", ")
        close = difflib.get_close_matches(match["name"], legal, n=1) or [
            name for name in legal if name.lower() == match["name"].lower()
        ]
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(legal))}"
        return f"{_path(match['where'], match['name'])}: no such key{hint}"
    if match := _MISSING.fullmatch(line):
        return f"{_path(match['where'], match['name'])}: is required"
    if match := _TYPE.fullmatch(line):
        legal_names = [_TYPE_NAMES.get(name, name) for name in match["legal"].split(", ")]
        legal_text = " or ".join(dict.fromkeys(name for name in legal_names if name))
        return f"{_path(match['where'], '')}: must be {legal_text}, is {match['value']}"
    return line


def _path(parent: str, name: str) -> str:
    inside = "" if parent == "input" else parent.strip(".")
    return ".".join(part for part in (inside, name) if part) or "the file"


def _enum_faults(value: Any, shape: Any, path: str) -> Iterator[str]:
    if shape.type_name == "structure" and isinstance(value, dict):
        for name, member in shape.members.items():
            if name in value:
                yield from _enum_faults(value[name], member, f"{path}.{name}" if path else name)
    elif shape.type_name == "list" and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _enum_faults(item, shape.member, f"{path}[{index}]")
    elif shape.type_name == "string" and isinstance(value, str):
        legal = getattr(shape, "enum", None) or [value]
        if value not in legal and shape.name not in _OPEN_ENUMS and not value.startswith("<"):
            yield f'{path}: "{value}" is not one of {", ".join(shape.enum)}'
