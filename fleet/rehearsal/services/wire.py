"""EC2's query protocol, both ways, from botocore's service model: form fields to parameters, answers to XML."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any
from xml.sax.saxutils import escape

from botocore.utils import parse_timestamp

from spotheal.fleet.rehearsal.services.client import service_model

_NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def parameters(operation: str, form: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a request, as boto3's caller gave them."""
    tree: dict[str, Any] = {}
    for name, value in form.items():
        node = tree
        *way, last = name.split(".")
        for part in way:
            inner = node.setdefault(part, {})
            if not isinstance(inner, dict):  # a scalar and a structure of one name: no such shape
                inner = node[part] = {}
            node = inner
        node[last] = value
    shape = service_model().operation_model(operation).input_shape
    parsed = _parse(shape, tree) if shape is not None else {}
    assert isinstance(parsed, dict)
    return parsed


def missing(operation: str, params: Mapping[str, Any]) -> str:
    """The first required parameter that was not given, or nothing."""
    shape = service_model().operation_model(operation).input_shape
    required = shape.required_members if shape is not None else []
    return next((str(name) for name in required if name not in params), "")


def _parse(shape: Any, node: Any) -> Any:
    kind = shape.type_name
    if kind == "structure":
        fields = node if isinstance(node, dict) else {}
        names = {member: _request_name(inner, member) for member, inner in shape.members.items()}
        return {member: _parse(shape.members[member], fields[name]) for member, name in names.items() if name in fields}
    if kind == "list":
        items = node if isinstance(node, dict) else {}
        return [_parse(shape.member, items[key]) for key in sorted((key for key in items if key.isdigit()), key=int)]
    text = str(node)
    if kind in ("integer", "long"):
        return int(text)
    if kind in ("float", "double"):
        return float(text)
    if kind == "boolean":
        return text.lower() == "true"
    if kind == "timestamp":
        return parse_timestamp(text).astimezone(timezone.utc)
    return base64.b64decode(text) if kind == "blob" else text


def _request_name(shape: Any, member: str) -> str:
    if "queryName" in shape.serialization:
        return str(shape.serialization["queryName"])
    name = str(shape.serialization.get("name", member))
    return name[0].upper() + name[1:]


def answer(operation: str, result: Mapping[str, Any], request_id: str) -> bytes:
    """The XML of a successful answer. Keys that the model does not know are left out."""
    shape = service_model().operation_model(operation).output_shape
    inner = _members(shape, result) if shape is not None else "<return>true</return>"
    name = f"{operation}Response"
    head = '<?xml version="1.0" encoding="UTF-8"?>\n'
    return f'{head}<{name} xmlns="{_NAMESPACE}"><requestId>{request_id}</requestId>{inner}</{name}>'.encode()


def error(code: str, message: str, request_id: str) -> bytes:
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Response><Errors><Error><Code>{_text(code)}</Code>'
        f"<Message>{_text(message)}</Message></Error></Errors><RequestID>{request_id}</RequestID></Response>"
    ).encode()


def _members(shape: Any, value: Mapping[str, Any]) -> str:
    return "".join(
        _element(inner, str(inner.serialization.get("name", member)), value[member])
        for member, inner in shape.members.items()
        if value.get(member) is not None
    )


def _element(shape: Any, name: str, value: Any) -> str:
    kind = shape.type_name
    if kind == "structure":
        content = _members(shape, value)
    elif kind == "list":
        item = str(shape.member.serialization.get("name", "item"))
        content = "".join(_element(shape.member, item, member) for member in value)
    elif kind == "timestamp":
        content = _time(value)
    elif kind == "boolean":
        content = "true" if value else "false"
    elif kind == "blob":
        content = base64.b64encode(value).decode()
    else:
        content = _text(str(value))
    return f"<{name}>{content}</{name}>"


def _time(moment: datetime) -> str:
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def _text(text: str) -> str:
    return escape(_NOT_XML.sub("\ufffd", text))
