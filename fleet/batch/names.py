"""Names of a job's resources at AWS Batch. Each has the job's tag, and is deleted only if it has it."""

from __future__ import annotations

from dataclasses import dataclass

from spotheal.agent.protocol.names import TAG_JOB

MADE_BY = "spotheal:made-by"
IMAGES = "spotheal"  # repository of ECR
EFS_PLACE = "/spotheal-efs"  # the mount point in containers
ROOT = "/spotheal"  # SPOTHEAL_ROOT of a container


@dataclass(frozen=True)
class Names:
    """Of a job: names of IAM have at most 64 characters, and a job's has 40."""

    job: str

    @property
    def spot(self) -> str:
        return f"spotheal-{self.job}-spot"

    @property
    def on_demand(self) -> str:
        return f"spotheal-{self.job}-on-demand"

    @property
    def queue(self) -> str:
        return f"spotheal-{self.job}"

    @property
    def definition(self) -> str:
        return f"spotheal-{self.job}"

    @property
    def log_group(self) -> str:
        return f"/spotheal/batch/{self.job}"

    @property
    def host_role(self) -> str:
        """Of the instances, and of their instance profile."""
        return f"spotheal-batch-host-{self.job}"

    @property
    def job_role(self) -> str:
        """The role of the programs in the containers."""
        return f"spotheal-batch-job-{self.job}"

    @property
    def execution_role(self) -> str:
        """Of ECS, for images and logs."""
        return f"spotheal-batch-exec-{self.job}"

    @property
    def roles(self) -> tuple[str, str, str]:
        return self.host_role, self.job_role, self.execution_role

    @property
    def tags(self) -> dict[str, str]:
        return {TAG_JOB: self.job, MADE_BY: "fleetctl batch"}
