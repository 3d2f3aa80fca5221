"""What a foreign program sees of the agent's environment: no credentials of ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from spotheal.agent.processes.account import Account

# Of the agent's own AWS_* only these: the rest may be credentials, which a trainer must not have.
_AWS_PASSED_ON = ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_EC2_METADATA_SERVICE_ENDPOINT")
# What systemd and Python put into the agent's environment is about the agent.
_AGENTS_OWN = {
    "INVOCATION_ID", "JOURNAL_STREAM", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "SYSTEMD_EXEC_PID",
    "CREDENTIALS_DIRECTORY", "STATE_DIRECTORY", "RUNTIME_DIRECTORY", "LOGS_DIRECTORY", "MEMORY_PRESSURE_WATCH",
    "LISTEN_PID", "LISTEN_FDS", "VIRTUAL_ENV", "PYTHONHOME", "PYTHONSAFEPATH", "OLDPWD", "PWD",
}  # fmt: skip
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def base_environment(environment: Mapping[str, str], account: Account | None, home: Path) -> dict[str, str]:
    """`own` (the agent's environment) as a foreign program may see it, with the account's HOME and USER.

    `home` serves where the account's own does not exist, as with users made for a service.
    """
    variables = {
        name: value
        for name, value in environment.items()
        if not name.startswith(("AWS_", "SPOTHEAL_", "BOTO_")) and name not in _AGENTS_OWN
    }
    variables |= {name: environment[name] for name in _AWS_PASSED_ON if name in environment}
    variables.setdefault("PATH", _PATH)
    if account is not None:
        of_account = account.home if os.path.isdir(account.home) and account.home != "/" else str(home)
        variables |= {"HOME": of_account, "USER": account.name, "LOGNAME": account.name}
        for name in [name for name in variables if name.startswith(("XDG_", "SUDO_", "SSH_", "DBUS_"))]:
            del variables[name]
    variables.setdefault("HOME", str(home))
    return variables
