"""The image of the containers: its name, its Dockerfile, the build, the push to ECR; and the prices of its hosts."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.clock import Clock
from spotheal.agent.protocol.errors import ConfigError, Fatal, NotFound, PermissionDenied, SpothealError
from spotheal.agent.protocol.job import JobConfig
from spotheal.agent.protocol.names import dns_suffix
from spotheal.fleet.account import types
from spotheal.fleet.account.prices import Price, spot_prices
from spotheal.fleet.batch.documents import GPU_FAMILIES, gpus_of
from spotheal.fleet.batch.names import IMAGES, ROOT
from spotheal.fleet.request import wheelhouse
from spotheal.fleet.run.session import Session

BASE = "pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime"  # on Docker Hub; CUDA inside, the driver is the host's
_TYPES_PRICED = 6
_ECR = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.(?:com|com\.cn|eu)/([^:@]+)(?::([^:@]+))?")
DOCKERFILE = """\
# Made by `fleetctl batch image push`: PyTorch, git, and spotheal's agent in an environment of its own.
FROM {base}
RUN apt-get update \\
 && apt-get install --yes --no-install-recommends git openssh-client ca-certificates python3 python3-venv \\
 && rm -rf /var/lib/apt/lists/*
# Trainers run as this user; the agent, and with it the job's credentials, as root.
RUN useradd --create-home spotheal-trainer
COPY wheels /tmp/wheels
RUN python3 -m venv /opt/spotheal/agent \\
 && /opt/spotheal/agent/bin/pip install --no-index --no-deps /tmp/wheels/*.whl \\
 && mkdir -p {root}/opt/spotheal/trainer \\
 && python3 -m zipfile --extract /tmp/wheels/{own} {root}/opt/spotheal/trainer \\
 && ln -s /opt/spotheal/agent/bin/spotheal-agent /usr/local/bin/spotheal-agent \\
 && rm -rf /tmp/wheels
ENV SPOTHEAL_ROOT={root}
CMD ["spotheal-agent", "batch"]
"""


@dataclass(frozen=True)
class Image:
    """The image to build, and its repository."""

    name: str
    repository: str
    tag: str
    region: str
    account: str
    dockerfile: str

    @property
    def registry(self) -> str:
        return self.name.partition("/")[0]


def named(session: Session, job: JobConfig) -> str:
    """`[batch] image`, else ours: its tag is made of the agent's own code, so that a new agent is a new image."""
    return job.batch.image or default_name(session)


def default_name(session: Session) -> str:
    tag = wheelhouse.build().sha256[:12]
    return f"{session.account}.dkr.ecr.{session.region}.{dns_suffix(session.region)}/{IMAGES}:{tag}"


def described(session: Session, base: str) -> Image:
    """ConfigError if `base` is no image's name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9./:@_-]{0,254}", base):
        raise ConfigError(f"--base {base!r} is no name of an image", next_step=f"write one such as {BASE}")
    name = default_name(session)
    match = _ECR.fullmatch(name)
    assert match is not None
    own_wheel = next(wheel.name for wheel in wheelhouse.build().wheels if wheel.name.startswith("spotheal-"))
    text = DOCKERFILE.format(base=base, root=ROOT, own=own_wheel)
    return Image(name, match.group(3), str(match.group(4)), match.group(2), match.group(1), text)


def exists(session: Session, name: str) -> bool | None:
    """Whether an image of this account's ECR is there; None: it lies elsewhere, or may not be looked at."""
    match = _ECR.fullmatch(name)
    if not match or match.group(1) != session.account:
        return None
    ecr = session.client("ecr", match.group(2))
    try:
        with translated(f"look for image {name}"):
            ecr.describe_images(repositoryName=match.group(3), imageIds=[{"imageTag": match.group(4) or "latest"}])
        return True
    except PermissionDenied:
        return None
    except NotFound:
        return False


def notes(session: Session, name: str) -> list[str]:
    if exists(session, name) is False:
        return [f"the image {name} is not there yet: `fleetctl batch image push` builds it"]
    if name != default_name(session):
        return [f"{name} must have git and spotheal in it: `fleetctl batch image push --print` shows how"]
    return []


def check(session: Session, name: str) -> None:
    """NotFound if the image cannot be there: every container of an array would fail to start."""
    if exists(session, name) is False:
        raise NotFound(f"the image {name} is not there", next_step="`fleetctl batch image push`, or name another in "
                       "[batch] image of job.toml and `fleetctl batch create`")  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- pushing
def push(session: Session, image: Image, say: Callable[[str], None]) -> None:
    """Build it here and push it. Fatal if Docker is missing, or fails."""
    docker = shutil.which("docker") or shutil.which("podman")
    if docker is None:
        raise Fatal(
            "there is no docker (or podman) on this machine, so the image cannot be built here",
            next_step="run this command on a machine with one (AWS CloudShell has it); --print shows the Dockerfile; or"
            " name an image of your own with spotheal in it under [batch] image",
        )
    _check_running(docker)
    _ensure_repository(session, image, say)
    with tempfile.TemporaryDirectory(prefix="spotheal-image-") as scratch:
        folder = write_context(image, Path(scratch))
        say(f"building {image.name}")
        _run([docker, "build", "--platform", "linux/amd64", "--tag", image.name, str(folder)], "build the image")
    _log_in(session, docker, image)
    say(f"pushing {image.name}")
    _run([docker, "push", image.name], "push the image")


def write_context(image: Image, folder: Path) -> Path:
    """The Dockerfile, with the wheels in the same folder."""
    house = wheelhouse.build()
    (folder / "wheels").mkdir()
    for wheel in house.wheels:
        shutil.copyfile(house.folder / wheel.name, folder / "wheels" / wheel.name)
    (folder / "Dockerfile").write_text(image.dockerfile, encoding="utf-8")
    return folder


def _ensure_repository(session: Session, image: Image, say: Callable[[str], None]) -> None:
    ecr = session.client("ecr", image.region)
    try:
        with translated(f"create repository {image.repository}"):
            ecr.create_repository(repositoryName=image.repository, imageTagMutability="MUTABLE",
                                  imageScanningConfiguration={"scanOnPush": True})  # fmt: skip
        say(f"created repository {image.repository} in ECR")
    except SpothealError as error:
        if error.code != "RepositoryAlreadyExistsException":
            raise


def _check_running(docker: str) -> None:
    """Fatal if the program exists and its daemon does not run: before anything is made in the account."""
    name = Path(docker).name
    try:
        process = subprocess.run([docker, "info"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise Fatal(f"{name} does not answer: {fault}", next_step=f"start {name}") from fault
    if process.returncode != 0:
        message = (process.stderr.strip().splitlines() or [f"`{name} info` ended with {process.returncode}"])[-1]
        raise Fatal(f"{name} does not work here: {message}",
                    next_step=f"start {name}, or use a machine with one; --print shows the Dockerfile")  # fmt: skip


def _log_in(session: Session, docker: str, image: Image) -> None:
    """The password goes in by standard input: an argument is readable for every user of this machine."""
    with translated("get a token of ECR"):
        answer = session.client("ecr", image.region).get_authorization_token()
    user, _, password = base64.b64decode(answer["authorizationData"][0]["authorizationToken"]).decode().partition(":")
    _run([docker, "login", "--username", user, "--password-stdin", image.registry], "log in to ECR", password)


def _run(argv: list[str], work: str, stdin_text: str | None = None) -> None:
    """Its output goes to standard error as it comes: a build takes minutes."""
    try:
        process = subprocess.run(argv, input=stdin_text, text=True, stdout=2, check=False)
    except OSError as fault:
        raise Fatal(f"could not {work}: {fault}") from fault
    if process.returncode != 0:
        raise Fatal(f"could not {work}: {Path(argv[0]).name} ended with {process.returncode}",
                    next_step="its output is above")  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- prices
def prices(session: Session, job: JobConfig, zones: tuple[str, ...], clock: Clock) -> tuple[Price, ...]:
    """Of the types that a container of this job most likely runs on; nothing if EC2 does not tell."""
    return spot_prices(session, tuple(likely_types(session, job)), zones, clock)


def likely_types(session: Session, job: JobConfig) -> list[str]:
    """Named types, and the types of named families that fit; AWS's own choice is not known before."""
    named_types = [name for name in job.batch.instance_types if "." in name]
    families = [name for name in job.batch.instance_types if "." not in name]
    gpus = gpus_of(job)
    if not job.batch.instance_types:
        families = list(GPU_FAMILIES) if gpus else ["m6i", "c6i"]
    families = [name for name in families if not name.startswith(("optimal", "default"))]
    if not families:
        return named_types
    try:
        candidates = types.describe(session, families, types.Need(gpus, 0, 0, job.batch.vcpus))
    except SpothealError:
        return named_types
    fitting = sorted(
        (kind for kind in candidates if kind.vcpus >= job.batch.vcpus), key=lambda item: (item.vcpus, item.name)
    )
    return [*named_types, *(kind.name for kind in fitting)][:_TYPES_PRICED]
