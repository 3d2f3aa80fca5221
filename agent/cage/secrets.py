"""Secrets, fetched on the instance with its role: for the trainer's environment, and to clone the repository.

From SSM's Parameter Store (`ssm:/path`) or Secrets Manager (`secretsmanager:id`, `secretsmanager:id#field` of a JSON
document). Whatever is fetched is known to the redaction before anybody else has it.
Source: SSM API, GetParameters (ten names a call); Secrets Manager API, GetSecretValue.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spotheal.agent.aws.clients import translated
from spotheal.agent.protocol.clock import Clock, Stop
from spotheal.agent.protocol.errors import (
    Fatal,
    NoCredentials,
    NotFound,
    PermissionDenied,
    SetupFailed,
    SpothealError,
)
from spotheal.agent.protocol.redaction import LENGTH_MIN, SECRETS
from spotheal.agent.protocol.retry_budget import Patience
from spotheal.agent.protocol.retrying import back_off, until_it_works
from spotheal.agent.protocol.secret_reference import SecretReference

NETWORK_SECONDS_MAX = 600.0
REFUSED_SECONDS_MAX = 20.0  # a policy changed a moment ago is not known everywhere yet
_NAMES_A_CALL = 10
REPOSITORY = "[job] repository_secret"


@dataclass(frozen=True)
class Vault:
    """`client(service)` gives a boto3 client of `ssm` or `secretsmanager`."""

    client: Callable[[str], Any]
    clock: Clock
    stop: Stop
    log: Any

    def fetch(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Name -> value, for name -> reference.

        Raises SetupFailed that names what is missing or not allowed, Retryable where AWS could not be reached for ten
        minutes, Interrupted at the stop.
        """
        if not texts:
            return {}
        references = {name: SecretReference.parse(text) for name, text in texts.items()}
        answers = self._patiently(references)
        values = {name: self._value(name, reference, answers) for name, reference in references.items()}
        SECRETS.learn([*answers.values(), *values.values()])
        short = sorted(name for name, value in values.items() if len(value) < LENGTH_MIN)
        if short:
            self.log.warning("secrets this short are taken out of logs only where they stand alone", names=short)
        self.log.info("fetched the secrets", names=sorted(values))
        return values

    def _patiently(self, references: Mapping[str, SecretReference]) -> dict[tuple[str, str], str]:
        patience, tries = Patience(self.clock, NETWORK_SECONDS_MAX, REFUSED_SECONDS_MAX), itertools.count(1)

        def passes(error: SpothealError) -> bool:
            return not isinstance(error, NoCredentials) and patience.bears(error, pause=back_off(next(tries)))

        try:
            return until_it_works(
                lambda: self._fetch(set(references.values())), self.clock, pause=back_off, passes=passes,
                stop=self.stop, log=self.log, line="secrets cannot be fetched; trying again",
            )  # fmt: skip
        except NoCredentials:
            raise
        except PermissionDenied as error:
            raise _not_allowed(references, error) from error
        except Fatal as error:
            raise SetupFailed(
                f"a secret cannot be fetched: {error.message}", next_step=error.next_step, code=error.code
            ) from error

    def _fetch(self, references: Iterable[SecretReference]) -> dict[tuple[str, str], str]:
        """(service, id) -> value; what is not there is left out."""
        values: dict[tuple[str, str], str] = {}
        parameters = sorted({reference.id for reference in references if reference.service == "ssm"})
        for start in range(0, len(parameters), _NAMES_A_CALL):
            names = parameters[start : start + _NAMES_A_CALL]
            with translated("read parameters of SSM"):
                answer = self.client("ssm").get_parameters(Names=names, WithDecryption=True)
            for parameter in answer["Parameters"]:
                values["ssm", parameter["Name"] + parameter.get("Selector", "")] = parameter["Value"]
        for name in sorted({reference.id for reference in references if reference.service == "secretsmanager"}):
            try:
                with translated(f"read {name} of Secrets Manager"):
                    answer = self.client("secretsmanager").get_secret_value(SecretId=name)
            except NotFound:
                continue
            if "SecretString" in answer:
                values["secretsmanager", name] = answer["SecretString"]
        return values

    def _value(self, name: str, reference: SecretReference, answers: Mapping[tuple[str, str], str]) -> str:
        value = answers.get((reference.service, reference.id))
        if value is None:
            cure = f"`fleetctl secret put {name}` makes it" if not name.startswith("[") else "make it"
            raise SetupFailed(
                f"the secret {name} ({reference}) is not there, or is no text",
                next_step=f"{cure} in the run's region; the reference stands in job.toml",
            )
        if reference.field:
            SECRETS.learn([value])
            value = _field(name, reference, value)
        if "\0" in value or not value:
            raise SetupFailed(
                f"the secret {name} ({reference}) is empty or holds a zero byte",
                next_step=f"`fleetctl secret put {name}`",
            )
        return value


def _field(name: str, reference: SecretReference, text: str) -> str:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    value = document.get(reference.field) if isinstance(document, dict) else None
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise SetupFailed(
            f"the secret {name} ({reference}) is no JSON document with the field {reference.field!r}",
            next_step=f"correct the secret, or leave out #{reference.field} in job.toml for the whole of it",
        )
    return str(value)


def _not_allowed(references: Mapping[str, SecretReference], error: PermissionDenied) -> SetupFailed:
    names = ", ".join(f"{name} ({reference})" for name, reference in references.items())
    options = " ".join(f"--secret {reference}" for reference in sorted(set(map(str, references.values()))))
    return SetupFailed(
        f"the instance's role may not read the secrets {names}: {error.message}",
        next_step=f"give the role what `python -m spotheal.iam instance-role … {options}` prints, and for a key of your"
        " own --kms-key",
        code=error.code,
    )
