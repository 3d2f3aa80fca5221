"""What git's messages mean (pure): can waiting help, and what is the next step.

git has one exit status, 128, for nearly everything; its English messages (LC_ALL=C) are all there is. Those of the
network come first: ssh and git add "make sure you have the correct access rights" to each of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit, urlunsplit


class Cause(Enum):
    NETWORK = "network"  # waiting may help
    NO_SUCH_COMMIT = "no such commit"  # with this way of fetching; a full clone may have it
    PERMANENT = "permanent"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Fault:
    cause: Cause
    message: str
    next_step: str


_ACCESS = (
    "give the instance access: `[job] repository_secret` names a token or a deploy key (`fleetctl secret put`), "
    'or repository = "." carries the commit in the store'
)
_NETWORK = re.compile(
    r"could not resolve (?:host|hostname|proxy)|name or service not known|temporary failure in name resolution|"
    r"connection (?:timed out|refused|reset|closed)|operation timed out|timed out|network is unreachable|"
    r"no route to host|failed to connect|couldn't connect|early eof|unexpected disconnect|the remote end hung up|"
    r"rpc failed|returned error: (?:5\d\d|429|408)|http[/ ]?\S* 5\d\d|empty reply from server|gnutls_handshake|"
    r"ssl_error_syscall|transfer closed|operation too slow|kex_exchange_identification|broken pipe|"
    r"recv failure|send failure|bad gateway|service unavailable",
    re.IGNORECASE,
)
_NO_SUCH_COMMIT = re.compile(
    r"not our ref|unadvertised object|couldn't find remote ref|could not find remote ref|dumb http transport|"
    r"shallow capabilit|does not support shallow|reference is not a tree|did not contain|no such remote ref",
    re.IGNORECASE,
)
_HOST_KEY = re.compile(r"host key verification failed|remote host identification has changed", re.IGNORECASE)
_LACKS_OBJECTS = re.compile(r"fatal: unable to read [0-9a-f]{40}")
_FSCK = "the repository lacks objects, as an incomplete copy does: `git fsck` there names them; clone it again"
_OTHER_KEY = (
    "the host shows none of the keys in `[job] known_hosts` (default: what known_hosts had where the request was made):"
    " connect once by hand, compare with what the host publishes, and request again"
)
_PERMANENT: tuple[tuple[str, str], ...] = (
    (r"authentication failed|could not read (?:username|password)|permission denied|returned error: 40[13]|"
     r"access denied|invalid username|terminal prompts disabled", _ACCESS),
    (r"repository .*not found|returned error: 404|does not appear to be a git repository|does not exist|"
     r"no such file or directory|not a git repository|not found", "correct `repository` in job.toml; " + _ACCESS),
    (r"transport .* not allowed|protocol .* (?:not supported|not allowed)|unable to find remote helper",
     "use an https or ssh URL in job.toml"),
    (r"dubious ownership", "make the repository's folder the agent's user's own"),
    (r"ssl certificate|certificate verif",
     "the server's certificate is not trusted by this image; correct the URL or the AMI"),
    (r"no space left on device|disk quota exceeded",
     "give the instance a larger root volume in spot_fleet_config.json"),
)  # fmt: skip


def classify(lines: Sequence[str], *, timed_out: bool = False) -> Fault:
    """What a failed git command's output means; the message is git's own first word on it."""
    texts = [line.strip() for line in lines if line.strip()]
    if timed_out:
        return Fault(Cause.NETWORK, "git had not ended in time", "")
    line_of_fault = next((line for line in texts if _HOST_KEY.search(line)), None)
    if line_of_fault:  # before the network: the connection is closed for it
        return Fault(Cause.PERMANENT, line_of_fault.strip("@ "), _OTHER_KEY)
    line_of_fault = next((line for line in texts if _LACKS_OBJECTS.search(line)), None)
    if line_of_fault:  # before the network: "early EOF" follows, and it was tried for an hour
        return Fault(Cause.PERMANENT, line_of_fault, _FSCK)
    for pattern, cause in ((_NETWORK, Cause.NETWORK), (_NO_SUCH_COMMIT, Cause.NO_SUCH_COMMIT)):
        line_of_fault = next((line for line in texts if pattern.search(line)), None)
        if line_of_fault:
            return Fault(cause, line_of_fault, "")
    for text, next_step in _PERMANENT:
        line_of_fault = next((line for line in texts if re.search(text, line, re.IGNORECASE)), None)
        if line_of_fault:
            return Fault(Cause.PERMANENT, line_of_fault, next_step)
    marked = [line for line in texts if line.startswith(("fatal:", "error:"))]
    return Fault(Cause.UNKNOWN, (marked or texts or ["git failed and said nothing"])[-1], "")


def redacted(text: str) -> str:
    """`text` with the user information of every URL in it replaced: a token in a URL is a secret."""
    return re.sub(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s@'\"]*(?:@[^/\s@'\"]*)*@", r"\1***@", text)


def without_credentials(url: str) -> str:
    """`url` as it may be left in a clone that the trainer reads: no password, and no user either over http."""
    parts = urlsplit(url) if "://" in url else None
    if parts is None or "@" not in parts.netloc:
        return url
    host = parts.netloc.rpartition("@")[2]
    user = parts.username if parts.scheme == "ssh" and parts.username else ""
    return urlunsplit(parts._replace(netloc=f"{user}@{host}" if user else host))


def refusal(repository: str) -> str:
    """Why `repository` is never given to git, or "": a remote helper (`ext::`) runs commands, a dash is an option."""
    if not repository or repository != repository.strip() or any(ord(c) < 32 or ord(c) == 127 for c in repository):
        return "is empty or holds blanks at its ends or control characters"
    if repository.startswith("-"):
        return "begins with a dash"
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", repository)
    if scheme:
        legal = scheme.group(1).lower() in ("https", "http", "ssh", "git", "file")
        return "" if legal else f"has the scheme {scheme.group(1)}, which is none of https, http, ssh, git and file"
    return "names a remote helper (`::`), which could run any command" if re.match(r"[^/]*::", repository) else ""
