"""The whole way of an instance, one line a stage. What a stage does is in `life`, and in the module named beside it."""

from __future__ import annotations

from collections.abc import Callable

from spotheal.agent.life.boot import Boot, ends_the_run
from spotheal.agent.life.code import Code
from spotheal.agent.life.ending import Ending
from spotheal.agent.life.gpus import Unsuitable
from spotheal.agent.life.stages import Life
from spotheal.agent.life.storage import VolumeStorage
from spotheal.agent.life.world import World
from spotheal.agent.protocol.ends import End, decide_end
from spotheal.agent.protocol.errors import ExitCode, Interrupted
from spotheal.agent.protocol.instance_config import InstanceConfig


def of_job(boot: Boot) -> Life:
    """The life of a machine that has the run for itself: on the job's volume, and its end is the fleet's."""
    storage = VolumeStorage(boot)
    return Life(boot, storage, Code(boot, storage.folders), Ending(boot))


def run(config: InstanceConfig, world: World, make: Callable[[Boot], Life] | None = None) -> ExitCode:
    """Live until the run is over or this machine goes away. `make` puts another life together than `of_job`.

    Returns OK where the agent must not be started again, another code or SpothealError where another start may help.
    """
    boot = Boot.register(config, world)  # metadata: who am I; launch: counted before anything else can fail
    with (make or of_job)(boot) as life:
        while True:
            try:
                life.finish(train(life))  # finish: results, reason, fleet cancelled
                return ExitCode.OK
            except Unsuitable as unsuitable:  # gpus: this machine's type cannot run the job, another may
                life.step_down(unsuitable)
                return ExitCode.OK
            except Interrupted:  # interruption: a notice, or the machine is shut down
                code = life.hand_over()  # handover: trainer ended, volume let go, snapshot, detached
                if code is not None:
                    return code


@ends_the_run
def train(life: Life) -> End:
    """From an instance that has nothing to the end of the run; raises Interrupted where this machine goes first."""
    life.look_back()  # launch, status: is the run over, or parked?
    life.start()  # repo: goes on while the volume is healed
    life.mount()  # volume: observe, plan, act until it is mounted here
    life.gpus.check()  # gpus: what the job asks for, looked at meanwhile
    life.prepare()  # repo, keep, setup_commands: the code at its revision and its environment
    trained = life.run_trainer()  # supervisor: attempt by attempt
    end = decide_end(trained)  # finish
    if end is None:
        raise Interrupted(trained.reason)
    return end
