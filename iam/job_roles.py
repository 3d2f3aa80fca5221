"""Names of the roles that belong to one job."""

from __future__ import annotations

from spotheal.iam import policies


def job_role(job: str) -> str:
    """Name of the role, and of its profile, that may touch that one job's things alone."""
    return f"{policies.JOB_ROLE}{job}"


def job_of(role: str) -> str:
    """The job that a role is for, "" where it is for any."""
    return role.removeprefix(policies.JOB_ROLE) if role.startswith(policies.JOB_ROLE) else ""
