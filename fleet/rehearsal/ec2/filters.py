"""Describes: filters as EC2 has them, pages, and the ids that a describe names but that are not there."""

from __future__ import annotations

import base64
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from spotheal.fleet.rehearsal.ec2.world import ApiError

FILTER_VALUES_MAX = 200
Item = dict[str, Any]
Field = Callable[[Item], Iterable[object]]


def plain(key: str) -> Field:
    """The filter that compares one field of the item."""
    return lambda item: [item[key]] if key in item else []


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]


def tags_for(params: Mapping[str, Any], resource_type: str) -> dict[str, str]:
    """Tags of `TagSpecifications` for one type of resource; `aws:` keys are refused."""
    tags: dict[str, str] = {}
    for specification in params.get("TagSpecifications") or []:
        if specification.get("ResourceType") == resource_type:
            tags.update(checked_tags(specification.get("Tags") or []))
    return tags


def checked_tags(tags: Iterable[Mapping[str, str]]) -> dict[str, str]:
    tags_by_key: dict[str, str] = {}
    for tag in tags:
        key, value = tag.get("Key", ""), tag.get("Value", "") or ""
        if key.lower().startswith("aws:"):
            raise ApiError(
                "InvalidParameterValue", f"Tag keys starting with 'aws:' are reserved for internal use: {key}"
            )
        if not key:
            raise ApiError("InvalidParameterValue", "Tag key cannot be empty")
        if len(key) > 128 or len(value) > 256:
            raise ApiError("InvalidParameterValue", f"Tag {key[:40]!r} exceeds the maximum length")
        tags_by_key[key] = value
    if len(tags_by_key) > 50:
        raise ApiError("TagLimitExceeded", "The maximum number of tags for a resource is 50")
    return tags_by_key


def select(
    items: Iterable[Item], filters: Iterable[Mapping[str, Any]] | None, fields: Mapping[str, Field]
) -> list[Item]:
    """The items that match all filters; a filter with an unknown name is an error, as at EC2."""
    filters = list(filters or [])
    if sum(len(condition.get("Values") or []) for condition in filters) > FILTER_VALUES_MAX:
        message = f"The maximum number of filter values specified on a single call is {FILTER_VALUES_MAX}"
        raise ApiError("FilterLimitExceeded", message)
    tests = [_test(str(condition.get("Name", "")), condition.get("Values") or [], fields) for condition in filters]
    return [item for item in items if all(test(item) for test in tests)]


def _test(name: str, values: list[str], fields: Mapping[str, Field]) -> Callable[[Item], bool]:
    get: Field
    if name.startswith("tag:"):
        key = name[4:]

        def get(item: Item) -> Iterable[object]:
            return [tag["Value"] for tag in item.get("Tags") or [] if tag["Key"] == key]
    elif name == "tag-key":

        def get(item: Item) -> Iterable[object]:
            return [tag["Key"] for tag in item.get("Tags") or []]
    elif name in fields:
        get = fields[name]
    else:
        raise ApiError("InvalidParameterValue", f"The filter '{name}' is invalid")
    if not values:
        raise ApiError("InvalidParameterValue", f"The filter '{name}' has no values")
    pattern = re.compile("|".join(_pattern(value) for value in values))
    return lambda item: any(pattern.fullmatch(_text(text)) for text in get(item))


@functools.lru_cache(maxsize=1000)
def _pattern(value: str) -> str:
    return fnmatch.translate(value.replace("[", "[[]"))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def named(items: list[Item], ids: list[str] | None, key: str, code: str) -> list[Item]:
    """Only the items named by `ids` (all of them where none is named); an absent one is an error."""
    if not ids:
        return items
    by_name = {item[key]: item for item in items}
    absent = [name for name in ids if name not in by_name]
    if absent:
        raise ApiError(code, _absent(code, absent))
    return [by_name[name] for name in dict.fromkeys(ids)]


def _absent(code: str, ids: list[str]) -> str:
    """In AWS's words, as far as they were recorded."""
    if code.startswith("InvalidLaunchTemplate"):
        return "At least one of the launch templates specified in the request does not exist."
    if code == "InvalidAMIID.NotFound":
        return f"The image id '[{', '.join(ids)}]' does not exist"
    kind = {"InvalidVolume.NotFound": "volume", "InvalidSnapshot.NotFound": "snapshot"}.get(code, "instance ID")
    if len(ids) > 1:
        return f"The {kind}s '{', '.join(ids)}' do not exist"
    return f"The {kind} '{ids[0]}' does not exist{'' if kind == 'instance ID' else '.'}"


def page(params: Mapping[str, Any], items: list[Item], key: str, page_size: int, size_min: int = 1) -> Item:
    """One page of `items`, with NextToken where more follow."""
    requested_size = params.get("MaxResults")
    if requested_size is not None and requested_size < size_min:
        raise ApiError(
            "InvalidParameterValue",
            f"Value ( {requested_size} ) for parameter maxResults is invalid. "
            f"Expecting a value greater than {size_min}.",
        )
    start = _offset(params.get("NextToken"))
    stop = start + min(requested_size or page_size, page_size)
    answer: Item = {key: items[start:stop]}
    if stop < len(items):
        answer["NextToken"] = base64.urlsafe_b64encode(f"after {stop}".encode()).decode()
    return answer


def _offset(token: str | None) -> int:
    if not token:
        return 0
    try:
        return int(base64.urlsafe_b64decode(token).decode().removeprefix("after "))
    except ValueError:
        raise ApiError("InvalidNextToken", f"The token '{token}' is invalid") from None


def no_ids_with_pages(params: Mapping[str, Any], key: str) -> None:
    if params.get("MaxResults") is not None and params.get(key):
        raise ApiError(
            "InvalidParameterCombination", f"The parameter {key} cannot be used with the parameter maxResults"
        )
