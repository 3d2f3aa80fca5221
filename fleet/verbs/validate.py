"""`fleetctl validate`: both files of a request, checked without AWS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spotheal.agent.protocol.errors import ConfigError
from spotheal.fleet.terminal.console import is_json, say, verb
from spotheal.fleet.terminal.options import JobFile, Output

EXAMPLE = "fleetctl validate spot_fleet_config.json"


@verb
def validate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="AWS's SpotFleetRequestConfig.")
    ] = Path("spot_fleet_config.json"),
    job: JobFile = None,
    output: Output = "",
) -> None:
    """Check both files of a request; calls no AWS.

    All faults are told at once, each with its place and its cure.
    """
    from spotheal.fleet.files import config, faults
    from spotheal.fleet.request import repository, userdata
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    job_file = job or config.job_file_beside(file)
    try:
        fleet, described = config.read_request(file, job_file)
        userdata.check_size(described)
        warnings = [*fleet.warnings, *repository.check_address(described.job.repository)]
        warnings += repository.check_script(described, job_file.resolve().parent)
    except ConfigError as error:
        if as_json:
            listed = faults.listed(error, (str(file), str(job_file)))
            print(show.as_json({"schema_version": 1, "valid": False, "faults": listed, "warnings": []}))
        raise
    for warning in warnings:
        say(f"note: {warning}")
    document = {"schema_version": 1, "valid": True, "faults": [], "warnings": warnings}
    print(show.as_json(document) if as_json else f"{file} and {job_file} are good")
    if not as_json:
        say(f"next: fleetctl rehearse {file}, fleetctl request {file} --dry-run")
