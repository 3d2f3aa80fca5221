"""Which run a verb means: of the job that is named, or of ./job.toml, which also knows region and store."""

from __future__ import annotations

from pathlib import Path

from spotheal.agent.protocol.errors import ConfigError
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.files import config
from spotheal.fleet.run import runs
from spotheal.fleet.run.session import Session


def find(session: Session, job: str, job_file: Path | None, run: str) -> tuple[Session, runs.Run]:
    """The run named, else the job's newest; ConfigError if no job is named, NotFound if it has no run."""
    described = _described(job, job_file)
    path = job_file or Path(config.DEFAULT_JOB_FILE)
    session.settle_region(described.job.region if described else "", config.region_beside(path))
    name = runs.check_job_name(job or (described.job.name if described else ""))
    root = session.store_root(described.store.url if described else "")
    return session, runs.find(session.client("s3"), root, name, run)


def find_root(session: Session, job_file: Path | None) -> tuple[Session, StoreUrl]:
    """The store of all jobs: the one that job.toml names, if there is one, else the account's."""
    path = job_file or Path(config.DEFAULT_JOB_FILE)
    described = config.read_job(path) if job_file is not None or path.exists() else None
    session.settle_region(described.job.region if described else "", config.region_beside(path))
    return session, session.store_root(described.store.url if described else "")


def _described(job: str, job_file: Path | None) -> JobConfig | None:
    """job.toml, if it describes the named job."""
    path = job_file or Path(config.DEFAULT_JOB_FILE)
    if job_file is None and not path.exists():
        if not job:
            raise ConfigError(
                "no job is named, and there is no job.toml here",
                next_step="name the job, or give --job FILE; `fleetctl status --all` lists the jobs",
            )
        return None
    try:
        described = config.read_job(path)
    except ConfigError:
        if job and job_file is None:
            return None
        raise
    return None if job and described.job.name != job else described
