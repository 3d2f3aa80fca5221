"""The trainer's own narrow role (`cage.trainer_policy`), as the metadata service gives a role's credentials.

The agent takes the job's role `spotheal-trainer-JOB` with the job's policy as session policy: the trainer may do what
both allow, and never what the instance may. A session lasts an hour (AWS's limit where one role takes another) and
is taken anew ten minutes before its end.
Source: STS API, AssumeRole; EC2 User Guide, "Retrieve security credentials from instance metadata".
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.clock import Clock, Stop, rfc3339
from spotheal.agent.protocol.errors import Fatal, NoCredentials, PermissionDenied, SetupFailed
from spotheal.agent.protocol.names import TRAINER_ROLE, partition_of
from spotheal.agent.protocol.redaction import SECRETS
from spotheal.agent.protocol.retry_budget import REFUSED_SECONDS_MAX
from spotheal.agent.protocol.retrying import back_off, until_it_works

SESSION_SECONDS = 3600
EARLY_SECONDS = 600.0


@dataclass
class TrainerRole:
    """`credentials` from any thread. `sts` is a boto3 client."""

    sts: Any
    clock: Clock
    account: str
    region: str
    job: str
    instance: str
    policy: str
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _document: str = ""
    _until: datetime | None = None

    @property
    def name(self) -> str:
        return f"{TRAINER_ROLE}{self.job}"

    @property
    def arn(self) -> str:
        return f"arn:{partition_of(self.region)}:iam::{self.account}:role/{self.name}"

    def check(self, stop: Stop) -> None:
        """SetupFailed where the role cannot be taken: better now than in the middle of the training.

        A refusal is borne for two minutes: a role that `request` has just made is not known everywhere. Interrupted
        where `stop` is set meanwhile.
        """
        try:
            until_it_works(
                self.credentials, self.clock, seconds_max=REFUSED_SECONDS_MAX, stop=stop, pause=back_off,
                passes=lambda error: isinstance(error, PermissionDenied) and not isinstance(error, NoCredentials),
            )  # fmt: skip
        except NoCredentials:
            raise
        except Fatal as error:
            raise SetupFailed(
                f"the trainer's role cannot be taken: {error.message}",
                next_step=f"let fleetctl make the role {self.name} (`request`, or by who makes roles"
                f" `fleetctl iam create --job {self.job} --trainer-policy FILE`); or leave out"
                " `[cage] trainer_policy`",
                code=error.code,
            ) from error

    def credentials(self) -> str:
        """The JSON document of the metadata service; SpothealError where there is none to be had."""
        with self._lock:
            moment = self.clock.now()
            if self._until is None or moment >= self._until - timedelta(seconds=EARLY_SECONDS):
                self._take(moment)
            return self._document

    def _take(self, moment: datetime) -> None:
        with translated(f"take the role {self.name}"):
            answer = self.sts.assume_role(
                RoleArn=self.arn,
                RoleSessionName=re.sub(r"[^\w+=,.@-]", "-", f"trainer-{self.instance}")[:64],
                DurationSeconds=SESSION_SECONDS,
                Policy=self.policy,
            )["Credentials"]
        SECRETS.learn([answer["SecretAccessKey"], answer["SessionToken"]])
        self._until = answer["Expiration"]
        self._document = json.dumps({
            "Code": "Success",
            "LastUpdated": rfc3339(moment),
            "Type": "AWS-HMAC",
            "AccessKeyId": answer["AccessKeyId"],
            "SecretAccessKey": answer["SecretAccessKey"],
            "Token": answer["SessionToken"],
            "Expiration": rfc3339(answer["Expiration"]),
        })
