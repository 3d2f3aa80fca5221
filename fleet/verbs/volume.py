"""`fleetctl volume …`: the volumes of jobs, and filling one before its job."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spotheal.agent.protocol.errors import ConfigError, Conflict
from spotheal.fleet.terminal.console import ask, is_json, open_session, say, verb
from spotheal.fleet.terminal.options import Output, Profile, Region, Yes, group

if TYPE_CHECKING:
    from spotheal.agent.aws.ec2 import Volume, VolumeSpec
    from spotheal.agent.protocol.job import JobConfig
    from spotheal.agent.protocol.names import StoreUrl
    from spotheal.fleet.account.roles import CreateInstanceRole
    from spotheal.fleet.run.session import Session
    from spotheal.fleet.volumes.filling import Filling, Followed

EXAMPLE = "fleetctl volume prepare --instance-type c7i.xlarge -- aws s3 cp --recursive s3://bucket/data ."
app = group("volume", "The volumes of jobs: list, create, adopt, fill, remove.", EXAMPLE)
VolumeId = Annotated[str, typer.Argument(metavar="VOLUME", help="Its id, vol-…")]
Job = Annotated[Path, typer.Option("--job", metavar="FILE", help="The job's file: name, size, mount, store.")]
InstanceType = Annotated[str, typer.Option("--instance-type", metavar="TYPE", help="What it runs on.")]
Zone = Annotated[str, typer.Option("--zone", metavar="NAME", help="For a new volume; else where spot is cheapest.")]
Spot = Annotated[bool, typer.Option("--spot", help="On spot: cheaper, may be interrupted and begun again.")]
Image = Annotated[str, typer.Option("--image", metavar="AMI", help="Else that of the fleet's file, or AWS's newest.")]
Which = Annotated[str, typer.Option("--volume", metavar="ID", help="Which; else the free one of the job.")]
JOB_FILE = Path("job.toml")


def _opened(file: Path, region: str, profile: str) -> tuple[Session, JobConfig, StoreUrl]:
    """For verbs that make or fill a volume, which is a job's; NotFound without a job's file."""
    from spotheal.fleet.files import config

    job, session = config.read_job(file), open_session(region, profile)
    session.settle_region(job.job.region, config.region_beside(file))
    return session, job, session.store_root(job.store.url)


def _looked(file: Path, region: str, profile: str) -> tuple[Session, JobConfig, StoreUrl]:
    """For verbs that need no job's file: without job.toml with its defaults."""
    from spotheal.agent.protocol.job import parse_job
    from spotheal.fleet.files import config

    if file.exists() or file != JOB_FILE:
        return _opened(file, region, profile)
    job = parse_job({"job": {"name": "volume", "repository": ".", "command": ["true"]}})
    session = open_session(region, profile)
    session.settle_region(config.region_beside(file))
    return session, job, session.store_root("")


@app.command("ls", epilog="Example: fleetctl volume ls")
@verb
def ls(job: Job = JOB_FILE, region: Region = "", profile: Profile = "", output: Output = "") -> None:
    """List the volumes of all jobs, and free ones with the name of this job's or the article's."""
    from spotheal.fleet.account import volumes
    from spotheal.fleet.run.table import table
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    session, described, _ = _looked(job, region, profile)
    rows = volumes.listed(session, described.volume.name)
    if as_json:
        print(show.as_json({"schema_version": 1, "volumes": [row.to_document() for row in rows]}))
        return
    documents = [row.to_document() for row in rows]
    keys = ("id", "name", "zone", "size_gib", "state", "job", "role", "instance")
    cells = [(*(document[key] for key in keys), _dollars(document["dollars_per_month"])) for document in documents]
    print(table(("VOLUME", "NAME", "ZONE", "GIB", "STATE", "JOB", "ROLE", "INSTANCE", "$/MONTH"), cells))
    if not documents:
        say("there is none; `fleetctl request` makes a job's own")


def _dollars(month: float | None) -> str:
    return "" if month is None else f"{month:.2f}"


@app.command("create", epilog="Example: fleetctl volume create --size 500")
@verb
def create(
    size: Annotated[
        int | None, typer.Option("--size", metavar="GIB", min=1, max=65536, help="Else job.toml's.")
    ] = None,
    kind: Annotated[str, typer.Option("--type", metavar="TYPE", help="EBS type; else job.toml's.")] = "",
    zone: Zone = "",
    job: Job = JOB_FILE,
    yes: Yes = False,
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Create an empty volume for the job, which its next request uses.

    Not needed before `fleetctl request`, which makes one itself.
    """
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.agent.protocol.job_values import volume_type
    from spotheal.fleet.account import volumes
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    session, described, _ = _opened(job, region, profile)
    if free := volumes.free_of(session, described):
        raise Conflict(
            f"{free[0].id} in {free[0].zone} was made for job {described.job.name!r} already, and is free",
            next_step="use that one, or set another [volume] name in job.toml",
        )
    table = described.volume
    zone = zone or _best_zone(session, job)
    spec = volumes.blank(described, zone, size or table.size_gib, kind or table.type)
    if fault := volume_type(spec.type):
        raise ConfigError(f"--type {fault}", next_step="--type gp3")
    month = volumes.month(spec.type, spec.size_gib)
    say(f'create a volume "{table.name}": {spec.size_gib} GiB {spec.type} in {spec.zone}, ${month:.2f} a month')
    ask("Go ahead?", yes)
    volume = volumes.make(session, spec, _day(), SystemClock())
    document = {"schema_version": 1, **volumes.Row(volume, month).to_document()}
    print(show.as_json(document) if as_json else volume.id)
    say("next: fleetctl volume upload DIR, fleetctl volume prepare -- COMMAND, or fleetctl request")


def _day() -> str:
    from datetime import datetime, timezone

    return datetime.now(timezone.utc).date().isoformat()


def _best_zone(session: Session, job_file: Path) -> str:
    """The zone in which the fleet's file would most likely launch; without a file the first zone of the VPC."""
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.agent.protocol.errors import NotFound
    from spotheal.fleet.account.network import network
    from spotheal.fleet.account.prices import spot_prices
    from spotheal.fleet.files import config
    from spotheal.fleet.request import plan, steps

    try:
        fleet = config.read_fleet(job_file.parent / config.DEFAULT_FLEET_FILE)
    except (NotFound, ConfigError):
        return next(iter(network(session).subnets))
    zones = steps.zones_of(session, fleet)
    return plan.cheapest_zone(zones, spot_prices(session, fleet.instance_types, zones, SystemClock()))


@app.command("adopt", epilog="Example: fleetctl volume adopt vol-0123456789abcdef0")
@verb
def adopt(
    volume: VolumeId, job: Job = JOB_FILE, yes: Yes = False, region: Region = "", profile: Profile = "",
    output: Output = "",
) -> None:  # fmt: skip
    """Give an existing volume to the job: its next request uses it, with all its files."""
    from spotheal.agent.protocol.names import TAG_JOB, TAG_NAME, TAG_RUN
    from spotheal.fleet.account import volumes
    from spotheal.fleet.account.volumes import free_volumes
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    session, described, root = _opened(job, region, profile)
    disk = volumes.known(session, volume)
    owner, name = described.job.name, described.volume.name
    volumes.refuse_other_job(disk, described)
    if TAG_RUN in disk.tags:
        raise Conflict(
            f"{disk.id} belongs to run {disk.tags[TAG_RUN]} already",
            next_step="`fleetctl request --resume` goes on with it, `--new-run` begins with another volume",
        )
    volumes.refuse_in_use(session, disk, root)
    namesakes = [
        free_volume.id for part in free_volumes(owner, session.ec2.volumes_named(name)) for free_volume in part
    ]
    if namesakes := [namesake for namesake in namesakes if namesake != disk.id]:
        raise Conflict(
            f'{", ".join(namesakes)} is named "{name}" too', next_step="set another [volume] name in job.toml"
        )
    say(f'give {disk.id} ({disk.size_gib} GiB in {disk.zone}) to job {owner} as "{name}": its next request uses it')
    ask("Go ahead?", yes)
    session.ec2.tag([disk.id], {TAG_NAME: name, TAG_JOB: owner})
    print(show.as_json({"schema_version": 1, "id": disk.id, "name": name}) if as_json else disk.id)
    say("next: fleetctl request")


@app.command("rm", epilog="Example: fleetctl volume rm vol-0123456789abcdef0")
@verb
def rm(
    volume: VolumeId, job: Job = JOB_FILE, yes: Yes = False, region: Region = "", profile: Profile = "",
    output: Output = "",
) -> None:  # fmt: skip
    """Delete a volume, with the checkpoints on it."""
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.account import volumes
    from spotheal.fleet.verbs import show

    as_json = is_json(output)
    session, _, root = _looked(job, region, profile)
    disk = volumes.known(session, volume)
    volumes.refuse_in_use(session, disk, root)
    row = volumes.Row(disk, volumes.month(disk.type, disk.size_gib)).to_document()
    owner = f"job {row['job']}, run {row['run']}, {row['role']}" if row["job"] else "of no job"
    say(f"delete {disk.id}: {disk.size_gib} GiB in {disk.zone}, {owner}; its files are gone then")
    ask("Go ahead?", yes)
    volumes.delete(session, disk, root, SystemClock())
    print(show.as_json({"schema_version": 1, "deleted": disk.id}) if as_json else disk.id)


@app.command("prepare", epilog=f"Example: {EXAMPLE}")
@verb
def prepare(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND …", help="Run in the volume's datasets folder.")],
    instance_type: InstanceType = "c7i.xlarge",
    volume: Which = "",
    zone: Zone = "",
    hours: Annotated[float, typer.Option("--hours", metavar="H", min=0.1, max=48, help="Ended after so long.")] = 12.0,
    spot: Spot = False,
    image: Image = "",
    job: Job = JOB_FILE,
    yes: Yes = False,
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Fill the volume on a short-lived instance: download, transcode, copy from s3://.

    Runs the command as root in the datasets folder, shows what it prints, and terminates the instance. No shell reads
    it: for pipes write `-- sh -c "…"`. Typed again after a Ctrl-C it goes on watching.
    """
    from dataclasses import replace

    from spotheal.fleet.volumes import filling as work

    as_json = is_json(output)
    session, described, root = _opened(job, region, profile)
    ready = _ready(session, described, volume, zone, instance_type, image, root, job)
    filling = replace(ready.filling, command=tuple(command), hours_max=hours, spot=spot)
    if (followed := _under_way(session, filling)) is None:
        filling, note = work.limited(session, filling)
        _tell(ready, [*filling.says(), note])
        ask("Go ahead?", yes)
        followed = _begin(session, root, ready, filling)
    _follow(session, followed, filling, as_json)


@app.command("upload", epilog="Example: fleetctl volume upload ./datasets")
@verb
def upload(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What goes to datasets/DIR of the volume.")],
    to: Annotated[str, typer.Option("--to", metavar="PATH", help="Below datasets/; else the folder's name.")] = "",
    instance_type: InstanceType = "c7i.large",
    volume: Which = "",
    zone: Zone = "",
    spot: Spot = False,
    image: Image = "",
    job: Job = JOB_FILE,
    yes: Yes = False,
    region: Region = "",
    profile: Profile = "",
    output: Output = "",
) -> None:
    """Copy a folder of this machine onto the volume, by way of the store's bucket.

    Cut short and typed again it sends what is missing. Takes a short-lived instance for the last step.
    """
    from dataclasses import replace

    from spotheal.agent.aws.s3 import Store
    from spotheal.fleet.request import submit
    from spotheal.fleet.terminal.bar import bar
    from spotheal.fleet.volumes import filling as work
    from spotheal.fleet.volumes import uploading

    as_json = is_json(output)
    scanned = uploading.scan(folder)
    target = to or folder.resolve().name
    if target.startswith("/") or ".." in Path(target).parts:
        raise ConfigError(f"--to {to!r} leaves the datasets folder", next_step="write a path below it")
    session, described, root = _opened(job, region, profile)
    ready = _ready(session, described, volume, zone, instance_type, image, root, job)
    uploading.check_room(scanned, ready.filling.volume.size_gib)
    store = Store(session.client("s3"), root.below("uploads", ready.name, uploading.name_of(target)))
    filling = replace(ready.filling, to=target, spot=spot)
    keys: list[str] = []
    if (followed := _under_way(session, filling)) is None:
        _, note = work.limited(session, filling)
        _tell(ready, [f"upload {len(scanned.files)} files, {scanned.size / 1e6:.1f} MB, to {store.url}",
                      *filling.says(), note])  # fmt: skip
        ask("Go ahead?", yes)
        submit.ensure_bucket(session, root.bucket)
        with bar("uploading", quiet=as_json) as progress:
            keys, size = uploading.upload(store, scanned, lambda done, _: progress(done, max(scanned.size, done)))
        whole = tuple(store.url.below(key).prefix for key in keys)
        # Once more: the upload has used some of the credentials' lifetime.
        filling, _ = work.limited(session, replace(filling, parts=whole, total_bytes=size))
        followed = _begin(session, root, ready, filling)
    _follow(session, followed, filling, as_json)
    uploading.delete(store, keys or store.keys("parts/"))


# --------------------------------------------------------------------------------------------------------------- parts
@dataclass(frozen=True)
class _Ready:
    """The checked plan; nothing is made yet. `spec`: the volume to make, `role`: the role; None if it exists."""

    filling: Filling
    spec: VolumeSpec | None
    role: CreateInstanceRole | None
    name: str  # of the volume: its id, or its Name if it must be made


def _ready(
    session: Session, job: JobConfig, named: str, zone: str, instance_type: str, image: str, root: StoreUrl,
    job_file: Path,
) -> _Ready:  # fmt: skip
    """The volume to fill (named, the job's free one, or a new one), the zone, and the missing parts."""
    from spotheal.fleet.account import images, network, roles, volumes
    from spotheal.fleet.files import config
    from spotheal.fleet.volumes.filling import Filling

    volume, spec = _which(session, job, named, zone, root, job_file)
    subnets = network.network(session).subnets
    if volume.zone not in subnets:
        raise ConfigError(f"the default VPC has no subnet in {volume.zone}", next_step="make one there")
    fleet_file = job_file.parent / config.DEFAULT_FLEET_FILE
    if not image and fleet_file.exists():
        specs = config.read_fleet(fleet_file).specifications
        image = specs[0]["ImageId"] if specs else ""
    has_gpu = instance_type.startswith(("g", "p"))
    image = image or (images.deep_learning(session) if has_gpu else images.ubuntu(session)).id
    role = roles.missing_instance_role(session, roles.INSTANCE_ROLE, root)
    roles.check_room(session, [role])
    filling = Filling(volume, job, image, instance_type, subnets[volume.zone], roles.profile_arn(session))
    return _Ready(filling, spec, role, volume.id or volumes.as_key(f"{job.job.name} {job.volume.name}"))


def _which(
    session: Session, job: JobConfig, named: str, zone: str, root: StoreUrl, job_file: Path
) -> tuple[Volume, VolumeSpec | None]:
    from spotheal.agent.aws.ec2 import Volume
    from spotheal.fleet.account import volumes
    from spotheal.fleet.volumes import filling

    free = [volumes.known(session, named)] if named else volumes.free_of(session, job)
    if len(free) > 1:
        ids = ", ".join(volume.id for volume in free)
        raise Conflict(f'several free volumes are named "{job.volume.name}": {ids}', next_step="--volume ID")
    if not free:
        table = job.volume
        spec = volumes.blank(job, zone or _best_zone(session, job_file), table.size_gib, table.type)
        return Volume("", spec.zone, "", spec.size_gib, spec.type, tags=spec.tags), spec
    volumes.refuse_other_job(free[0], job)
    if filling.under_way(session, free[0].id) is None:
        volumes.refuse_in_use(session, free[0], root)
    if zone and zone != free[0].zone:
        raise ConfigError(f"{free[0].id} is in {free[0].zone}, not {zone}", next_step="leave --zone out")
    return free[0], None


def _under_way(session: Session, filling: Filling) -> Followed | None:
    from spotheal.fleet.volumes import filling as work

    running = work.under_way(session, filling.volume.id) if filling.volume.id else None
    if running is not None:
        say(f"{running.instance} fills {running.volume} already; watching it")
    return running


def _tell(ready: _Ready, notes: list[str]) -> None:
    from spotheal.fleet.account import volumes

    if ready.spec is not None:
        month = volumes.month(ready.spec.type, ready.spec.size_gib) or 0.0
        say(f'create a volume "{ready.spec.tags["Name"]}": {ready.spec.size_gib} GiB {ready.spec.type} in '
            f"{ready.spec.zone}, ${month:.2f} a month")  # fmt: skip
    if ready.role is not None:
        say(ready.role.says())
    for line in filter(None, notes):
        say(line)


def _begin(session: Session, root: StoreUrl, ready: _Ready, filling: Filling) -> Followed:
    """Make the missing parts, and launch."""
    from dataclasses import replace

    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.agent.protocol.names import TAG_JOB
    from spotheal.fleet.account import prerequisites, volumes
    from spotheal.fleet.request import submit
    from spotheal.fleet.volumes import filling as work

    submit.ensure_bucket(session, root.bucket)
    if ready.role is not None:
        prerequisites.make(session, ready.role)
    if ready.spec is not None:
        filling = replace(filling, volume=volumes.make(session, ready.spec, _day(), SystemClock()))
    elif TAG_JOB not in filling.volume.tags:  # named with --volume; from now on it holds this job's data
        session.ec2.tag([filling.volume.id], {TAG_JOB: filling.job.job.name})
    return work.launch(session, root, filling, SystemClock())


def _follow(session: Session, followed: Followed, filling: Filling, as_json: bool) -> None:
    from spotheal.agent.protocol.clock import SystemClock
    from spotheal.fleet.terminal.bar import bar
    from spotheal.fleet.verbs import show
    from spotheal.fleet.volumes import filling as work

    output = work.Output()

    def put(data: bytes) -> None:
        print(output.plain(data), end="", file=sys.stderr if as_json else sys.stdout, flush=True)

    with bar("unpacking", quiet=as_json or not filling.parts) as progress:

        def shown(status: dict[str, Any]) -> None:
            if status.get("total_bytes"):
                progress(status["done_bytes"], status["total_bytes"])

        status = work.follow(session, followed, SystemClock(), say, put, shown)
    document = {"schema_version": 1, "volume": followed.volume, "instance": followed.instance,
                "exit_code": status["exit_code"], "free_bytes": status.get("free_bytes")}  # fmt: skip
    print(show.as_json(document) if as_json else f"{followed.volume}  filled")
    say("next: fleetctl request, which uses it")
