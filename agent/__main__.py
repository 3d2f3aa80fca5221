"""`spotheal-agent`: wiring only. What the agent does is in `run`."""

from __future__ import annotations

import argparse
import faulthandler
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from spotheal.agent import __version__
from spotheal.agent.protocol.errors import ConfigError, ExitCode, SpothealError
from spotheal.agent.protocol.instance_config import InstanceConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 the run is over or AWS takes this machine, 2 configuration, anything else: start me again."""
    options = _parser().parse_args(arguments)
    if options.command == "batch":
        return _run_in_container()
    try:
        if options.command == "check":
            return _check(InstanceConfig.from_json(_read(options.config)))
        config = InstanceConfig.from_json(_read(options.config), source=str(options.config))
    except ConfigError as error:
        said = error.message.replace("\n", "; ") if options.command == "check" else f"spotheal-agent: {error}"
        print(said, file=sys.stderr)
        return ExitCode.USAGE
    return _run(config)


def _check(config: InstanceConfig) -> int:
    """Imports and makes what every run needs first: an agent that cannot would be started again for ever."""
    import spotheal.agent.life.run
    import spotheal.agent.nodes.life
    import spotheal.agent.sweep.worker  # noqa: F401
    from spotheal.agent.aws import clients
    from spotheal.agent.life.world import World

    if missing := clients.missing_services():
        print(f"botocore has no models here of {', '.join(missing)}", file=sys.stderr)
        return ExitCode.UNEXPECTED
    World.real(config)
    return ExitCode.OK


def _run(config: InstanceConfig) -> int:
    # Imported here so that a wrong configuration is named at once, without boto3's third of a second.
    from spotheal.agent.life.run import run
    from spotheal.agent.life.world import World
    from spotheal.agent.nodes.life import of_node
    from spotheal.agent.sweep.worker import run_sweep

    world = World.real(config)
    world.logs.bind(job=config.job.job.name, run=config.run)

    def terminated(_: int, __: FrameType | None) -> None:
        world.asked_to_stop.set()

    faulthandler.enable()  # systemd's watchdog ends an agent that hangs with SIGABRT: where did each thread hang?
    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, terminated)
    try:
        if config.entries:
            return run_sweep(config, world)
        return run(config, world, of_node if config.job.on_machines else None)
    except SpothealError as error:
        world.logs.log.error(error.message, next=error.next_step or None, code=error.code or None)
        return error.exit_code
    except Exception:
        world.logs.log.exception("unexpected error; the agent is started again")
        return ExitCode.UNEXPECTED


def _run_in_container() -> int:
    """A container of AWS Batch. Exit codes: 0 done, 75 again on another host, anything else an end (1: a fault of
    ours, with Python's own traceback)."""
    from spotheal.agent.batch.container import run_container
    from spotheal.agent.protocol.contract import EXIT_SAVED_AND_STOPPED
    from spotheal.agent.protocol.errors import Interrupted, NoCredentials, Retryable

    try:
        return run_container()
    except (Retryable, Interrupted, NoCredentials) as error:
        print(f"spotheal-agent: {error}", file=sys.stderr)
        return EXIT_SAVED_AND_STOPPED
    except SpothealError as error:
        print(f"spotheal-agent: {error}", file=sys.stderr)
        return error.exit_code


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", next_step="name the instance's configuration with --config FILE"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spotheal-agent",
        description="Runs a training job on this instance: heals its volume, runs the trainer, ends the fleet.",
        epilog="Any endpoint: AWS_ENDPOINT_URL, AWS_EC2_METADATA_SERVICE_ENDPOINT. All files lie below SPOTHEAL_ROOT.",
    )
    parser.add_argument("--version", action="version", version=f"spotheal-agent {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the job until it is over or this machine goes away")
    run.add_argument("--config", type=Path, required=True, metavar="FILE", help="the configuration, JSON")
    check = commands.add_parser("check", help="try whether the agent can run here; the last line says why not")
    check.add_argument("--config", type=Path, required=True, metavar="FILE", help="the configuration, JSON")
    commands.add_parser("batch", help="run the job in a container of AWS Batch, which `fleetctl batch submit` starts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
