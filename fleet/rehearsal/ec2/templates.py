"""Launch templates: versions of launch data, which fleets and RunInstances resolve."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from spotheal.fleet.rehearsal.ec2.filters import Field, Item, named, page, select, tag_list, tags_for
from spotheal.fleet.rehearsal.ec2.instances import user_data
from spotheal.fleet.rehearsal.ec2.world import ApiError, Template, World, not_here

Params = Mapping[str, Any]


def create_launch_template(world: World, params: Params, caller: str | None) -> Item:
    token = params.get("ClientToken", "")
    fingerprint = json.dumps({**params, "DryRun": None}, sort_keys=True, default=str)
    stored = world.tokens.get(("CreateLaunchTemplate", token)) if token else None
    if stored is not None:
        if stored[0] != fingerprint:
            raise ApiError("IdempotentParameterMismatch", "The client token was used with other parameters.")
        earlier = world.templates.get(stored[1])
        if earlier is not None:
            return {"LaunchTemplate": _template(earlier)}
    name = params["LaunchTemplateName"]
    if not re.fullmatch(r"[a-zA-Z0-9().\-/_]{3,128}", name):
        raise ApiError(
            "InvalidLaunchTemplateName.MalformedException", f"The launch template name {name!r} is malformed."
        )
    if any(template_of_account.name == name for template_of_account in world.templates.all()):
        raise ApiError("InvalidLaunchTemplateName.AlreadyExistsException", "Launch template name already in use.")
    data = params["LaunchTemplateData"]
    user_data(data.get("UserData"))
    template = world.templates.put(
        Template(
            id=world.new_id("lt"),
            name=name,
            created=world.now().replace(microsecond=0),
            versions=((data, params.get("VersionDescription", ""), world.now().replace(microsecond=0)),),
            tags=tags_for(params, "launch-template"),
        )
    )
    if token:
        world.tokens["CreateLaunchTemplate", token] = (fingerprint, template.id, world.moment())
    return {"LaunchTemplate": _template(template)}


def create_launch_template_version(world: World, params: Params, caller: str | None) -> Item:
    template = find(world, params)
    data = params["LaunchTemplateData"]
    user_data(data.get("UserData"))
    if params.get("SourceVersion"):
        data = {**template.versions[version_of(template, params["SourceVersion"]) - 1][0], **data}
    version = (data, params.get("VersionDescription", ""), world.now().replace(microsecond=0))
    template = world.templates.put(replace(template, versions=(*template.versions, version)))
    return {"LaunchTemplateVersion": _version(template, len(template.versions))}


def modify_launch_template(world: World, params: Params, caller: str | None) -> Item:
    if params.get("LaunchTemplateId") and params.get("LaunchTemplateName"):
        message = "Either provide launch template ID or launch template name to modify the template."
        raise ApiError("InvalidParameterCombination", message)
    template = find(world, params)
    number = params.get("DefaultVersion", "$Default")
    if number.isdigit() and not 1 <= int(number) <= len(template.versions):
        message = f"The launch template version {number} is not found for the specified launch template."
        raise ApiError("InvalidLaunchTemplateId.VersionNotFound", message)
    template = world.templates.put(replace(template, default=version_of(template, number)))
    return {"LaunchTemplate": _template(template)}


def delete_launch_template(world: World, params: Params, caller: str | None) -> Item:
    template = find(world, params)
    world.templates.remove(template.id)
    return {"LaunchTemplate": _template(template)}


def describe_launch_templates(world: World, params: Params, caller: str | None) -> Item:
    items = [_template(template) for template in world.templates.at(world.viewed())]
    items = named(items, params.get("LaunchTemplateIds"), "LaunchTemplateId", "InvalidLaunchTemplateId.NotFound")
    names = params.get("LaunchTemplateNames")
    items = named(items, names, "LaunchTemplateName", "InvalidLaunchTemplateName.NotFoundException")
    fields: dict[str, Field] = {
        "launch-template-name": lambda one: [one["LaunchTemplateName"]],
        "create-time": lambda one: [one["CreateTime"]],
    }
    return page(params, select(items, params.get("Filters"), fields), "LaunchTemplates", world.page_size)


def describe_launch_template_versions(world: World, params: Params, caller: str | None) -> Item:
    if not (params.get("LaunchTemplateId") or params.get("LaunchTemplateName")):
        raise _unnamed(params.get("Versions") or [])
    template = find(world, params)
    numbers_of_versions = [version_of(template, number) for number in params.get("Versions") or []]
    numbers = numbers_of_versions or list(range(len(template.versions), 0, -1))
    return page(params, [_version(template, number) for number in numbers], "LaunchTemplateVersions", world.page_size)


def _unnamed(versions: list[str]) -> ApiError:
    """AWS describes the default or latest versions of all templates, which is no call of ours."""
    if versions and set(versions) <= {"$Latest", "$Default"}:
        return not_here("DescribeLaunchTemplateVersions of all launch templates")
    return ApiError(
        "InvalidParameterValue" if versions else "MissingParameter",
        "To describe the launch template data for a specific launch template, specify its ID or name.",
    )


def find(world: World, params: Params) -> Template:
    """The template that `LaunchTemplateId` or `LaunchTemplateName` means."""
    template_id, name = params.get("LaunchTemplateId"), params.get("LaunchTemplateName")
    if bool(template_id) == bool(name):
        raise ApiError("MissingParameter", "Exactly one of the launch template's id and name must be given")
    if template_id:
        template_by_id = world.templates.get(template_id)
        if template_by_id is None:
            message = f"The specified launch template, with template ID {template_id}, does not exist."
            raise ApiError("InvalidLaunchTemplateId.NotFound", message)
        return template_by_id
    by_name = next((template for template in world.templates.all() if template.name == name), None)
    if by_name is None:
        message = f"The specified launch template, with template name {name}, does not exist."
        raise ApiError("InvalidLaunchTemplateName.NotFoundException", message)
    return by_name


def version_of(template: Template, text: str) -> int:
    number = {"$Latest": len(template.versions), "$Default": template.default, "": template.default}.get(text)
    if number is None:
        number = int(text) if text.isdigit() else 0
    if not 1 <= number <= len(template.versions):
        raise ApiError(
            "InvalidLaunchTemplateId.VersionNotFound",
            f"Could not find the specified version {text} for the launch template with ID {template.id}.",
        )
    return number


def data_of(world: World, specification: Params) -> dict[str, Any]:
    """The launch data that a `LaunchTemplate(Specification)` means, a copy."""
    template = find(world, {key: value for key, value in specification.items() if value})
    return dict(template.versions[version_of(template, specification.get("Version") or "") - 1][0])


def _template(template: Template) -> Item:
    shaped: Item = {
        "LaunchTemplateId": template.id,
        "LaunchTemplateName": template.name,
        "CreateTime": template.created,
        "DefaultVersionNumber": template.default,
        "LatestVersionNumber": len(template.versions),
    }
    return shaped | ({"Tags": tag_list(template.tags)} if template.tags else {})


def _version(template: Template, number: int) -> Item:
    data, description, created = template.versions[number - 1]
    shaped: Item = {
        "LaunchTemplateId": template.id,
        "LaunchTemplateName": template.name,
        "VersionNumber": number,
        "CreateTime": created,
        "DefaultVersion": number == template.default,
        "LaunchTemplateData": dict(data),
    }
    return shaped | ({"VersionDescription": description} if description else {})


OPERATIONS: dict[str, Callable[[World, Params, str | None], Item]] = {
    "CreateLaunchTemplate": create_launch_template,
    "CreateLaunchTemplateVersion": create_launch_template_version,
    "ModifyLaunchTemplate": modify_launch_template,
    "DeleteLaunchTemplate": delete_launch_template,
    "DescribeLaunchTemplates": describe_launch_templates,
    "DescribeLaunchTemplateVersions": describe_launch_template_versions,
}
