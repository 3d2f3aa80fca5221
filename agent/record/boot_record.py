"""`launches/<instance>.json`: each launch of the run, counted before anything can fail, and what came of it.

`outcome`: booting, training, interrupted, ended, barred (its instance type cannot run the job). `acknowledged`: whether
a checkpoint newer than the one it began with became durable in this launch. `starts`: of the agent, since the last
acknowledged checkpoint. The bootstrap of the user data writes the first version, the agent the rest.
"""

from __future__ import annotations

from typing import Any

from spotheal.agent.aws.imds import Identity
from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.clock import Clock, rfc3339
from spotheal.agent.protocol.errors import SpothealError
from spotheal.agent.protocol.names import LAYOUT
from spotheal.agent.protocol.retry_budget import Patience
from spotheal.agent.protocol.retrying import until_it_works

COUNT_SECONDS_MAX = 120.0  # a network may come up after us; as long without rights


class Launch:
    """This instance's document."""

    def __init__(self, store: Store, identity: Identity, fields: dict[str, Any]) -> None:
        self._store, self._here, self._fields = store, identity, fields

    @classmethod
    def count(cls, store: Store, identity: Identity, clock: Clock, requested_at: str = "") -> Launch:
        """Count this launch; an agent that is started again on the same instance goes on with what is there.

        Raises what the store says after `COUNT_SECONDS_MAX`.
        """

        def count() -> Launch:
            document = store.get_json(LAYOUT.launch(identity.instance)) or {}
            fields = {"time": rfc3339(clock.now()), "acknowledged": False, **document}
            fields |= {"zone": identity.zone, "instance_type": identity.instance_type, "outcome": "booting"}
            fields["requested_at"] = requested_at
            starts = document.get("starts", 0)
            fields["starts"] = (starts if isinstance(starts, int) else 0) + 1
            store.count_launch(identity.instance, fields)
            return cls(store, identity, fields)

        budget = Patience(clock, COUNT_SECONDS_MAX, COUNT_SECONDS_MAX)
        return until_it_works(count, clock, passes=budget.bears, pause=2.0)

    @property
    def instance(self) -> str:
        return self._here.instance

    @property
    def starts(self) -> int:
        return int(self._fields["starts"])

    def note(self, **fields: Any) -> None:
        """Change fields; a store that is down loses the note and stops nothing."""
        if fields.items() <= self._fields.items():
            return
        self._fields |= fields
        try:
            self._store.count_launch(self._here.instance, self._fields)
        except SpothealError:
            return

    def others_since_progress(self) -> list[dict[str, Any]]:
        """The run's other launches since one acknowledged a checkpoint, by time: in a healthy run one is read.

        Those of an earlier request are forgiven: a run that was parked and is requested again begins to count anew.
        """
        requested_at = self._fields.get("requested_at", "")
        launches: list[dict[str, Any]] = []
        for launch in self._store.latest_launches():
            if launch.get("instance") == self._here.instance:
                continue
            if launch.get("acknowledged"):
                break
            if launch.get("requested_at", requested_at) == requested_at:  # by name, not by time: clocks differ
                launches.insert(0, launch)
        return launches
