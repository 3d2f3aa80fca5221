"""The rehearsal's AWS_ENDPOINT_URL: the rule book for what it owns of EC2, moto in this process for everything else.

Who calls is told by the access key that signed the request (`signatures` checks it): an instance, a role's session, one
of the people of `authorization`, or the account's owner. Nothing is answered without a key of this cloud: other users
of this machine and web pages reach the port too. One moto, and so one set of buckets and roles, exists in a process: a
new endpoint empties it.
"""

from __future__ import annotations

import base64
import hmac
import io
import json
import math
import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

from botocore.model import OperationNotFoundError
from moto.backends import list_of_moto_modules
from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends
from moto.moto_api._internal.models import moto_api_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from spotheal.agent.protocol.clock import rfc3339
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.rehearsal.batch.batch import Batch
from spotheal.fleet.rehearsal.ec2 import refusals, tags
from spotheal.fleet.rehearsal.ec2.access_keys import AccessKey
from spotheal.fleet.rehearsal.ec2.faults import Faults
from spotheal.fleet.rehearsal.ec2.rulebook import ApiError, Call, ReplyLost, Rulebook
from spotheal.fleet.rehearsal.services import sessions, signatures, web, wire
from spotheal.fleet.rehearsal.services.account import Account
from spotheal.fleet.rehearsal.services.authorization import OWNER, PEOPLE, Authorization
from spotheal.fleet.rehearsal.services.efs import FileSystems
from spotheal.fleet.rehearsal.services.imds import Imds
from spotheal.fleet.rehearsal.services.schedules import Schedules
from spotheal.fleet.rehearsal.services.signatures import Fault, Signed
from spotheal.iam import policies

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
_KNOWN_SERVICES = frozenset(list_of_moto_modules())
_ACCESS_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
_ROLES = "/_role/"  # credentials of containers, as ECS's agent hands them out
_QUERY_SERVICES = ("iam", "sts", "sns", "")  # their errors are XML, those of the others JSON
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 409: "Conflict",
            412: "Precondition Failed", 500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip


def is_importable(material: str) -> bool:
    """Whether EC2 imports the key, given in base64: RSA and ED25519 only (API reference, ImportKeyPair)."""
    try:
        words = base64.b64decode(material, validate=True).split()
    except ValueError:
        return False
    return len(words) >= 2 and words[0] in (b"ssh-rsa", b"ssh-ed25519")


class _Quiet(MotoRequestHandler):
    """No line on stderr for each request."""

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class Endpoint:
    """Serves on 127.0.0.1, on a free port, until `close`. `store_faults` is for S3.

    `forwarded` lists the calls that moto answered, `rulebook.calls` the others.
    """

    def __init__(self, rulebook: Rulebook) -> None:
        self.rulebook = rulebook
        self.store_faults = Faults()
        self.forwarded: list[Call] = []
        self.send_key: Callable[[str, str], bool] = lambda instance, key: False  # the cloud's machines may take it
        self.control: Callable[[str, dict[str, str]], dict[str, Any]] | None = None  # orders below /_cloud/
        self.schedules = Schedules(rulebook)
        self.batch: Batch | None = None  # with CloudWatch Logs; the cloud's, which runs containers
        self.keys: dict[str, str] = dict(PEOPLE)  # access key ids of people and of roles that are no instance's
        self._containers: dict[str, str] = {}  # words of addresses -> access key ids
        self.ends: dict[str, float] = {}  # access key id -> when these temporary credentials end, by the clock
        self.efs = FileSystems(rulebook)
        self.authorization = Authorization(rulebook.world, self._policies)
        rulebook.authorize = self.authorization.ec2
        rulebook.world.may_use_key = self.authorization.may_use_key
        self.sessions = sessions.Sessions(rulebook.world, self.authorization, self.keys)
        self._conditional = threading.Lock()
        self._metadata: dict[str, Imds] = {}
        self._metadata_lock = threading.Lock()
        moto_api_backend.reset()
        rulebook.world.zone_of_subnet = self._zone_of_subnet
        rulebook.world.tags_of_file_system = self.efs.tags_of
        self.account = Account(rulebook.world)
        rulebook.world.launch_fault = self.account.check_launch
        rulebook.world.image_fault = self.account.image_fault
        rulebook.world.role_fault = self.account.role_fault
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=_Quiet)
        self.hosts = {f"{name}:{self._server.server_port}" for name in web.LOOPBACK}  # what requests may call it
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="aws", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def key_of_person(self, person: str = "") -> AccessKey:
        """The key of one of `PEOPLE`, by default of the first, or `OWNER`'s."""
        key_id = (
            next(iter(PEOPLE)) if not person else next((key for key, name in PEOPLE.items() if name == person), OWNER)
        )
        return self.rulebook.world.keys.of(key_id)

    def metadata(self, instance: str) -> Imds:
        """The metadata service of `instance`, started at the first call."""
        with self._metadata_lock:
            if instance not in self._metadata:
                self._metadata[instance] = Imds(self.rulebook, instance)
            return self._metadata[instance]

    def metadata_url(self, instance: str) -> str:
        return self.metadata(instance).url

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(5)
        self._server.server_close()
        with self._metadata_lock:
            for server in self._metadata.values():
                server.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------------- answers
    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if refused := web.refusal(lambda name: _header(environ, name), self.hosts):
            return _send(start_response, 403, refused.encode())
        if environ.get("PATH_INFO") == "/_cloud/nfs":
            return self._nfs(environ, start_response)
        if environ.get("PATH_INFO", "").startswith(_ROLES):
            return self._role_credentials(environ, start_response)
        signed = signatures.read(environ)
        service = signed.service if signed else ""
        fault = self._fault(environ, signed)
        if fault is not None and environ.get("PATH_INFO", "").startswith("/_cloud/"):
            return _send(start_response, 403, fault.value.encode())
        if fault is not None or signed is None:
            is_json = service not in _QUERY_SERVICES or bool(_header(environ, "X-Amz-Target"))
            answer = signatures.refusal(fault or Fault.MISSING, service, is_json=is_json)
            return _send(start_response, *answer)
        return self._answered(environ, start_response, signed)

    def _fault(self, environ: Environ, signed: Signed | None) -> Fault | None:
        if signed is None:
            return Fault.MISSING
        is_known = signed.key == OWNER or signed.key in self.keys or self.rulebook.caller_of(signed.key)
        key = self.rulebook.world.keys.of(signed.key) if is_known else None
        if fault := signatures.check(environ, signed, key):
            return fault
        is_over = self.rulebook.world.moment() >= self.ends.get(signed.key, math.inf)
        return Fault.ENDED if is_over else None

    def _answered(self, environ: Environ, start_response: StartResponse, signed: Signed) -> Iterable[bytes]:
        key, service = signed.key, signed.service
        if self.control is not None and environ.get("PATH_INFO", "").startswith("/_cloud/"):
            return self._ordered(environ, start_response, self._caller(key))
        form = _form(environ)
        action = form.get("Action", "")
        if service == "ec2":
            is_owned = self.rulebook.owns(action)
            if refusal := refusals.of_ec2(action, form, signed.region, self.rulebook.region, is_owned=is_owned):
                return _send(start_response, refusal.status, wire.error(refusal.code, refusal.message, "-"))
            if self.rulebook.owns(action) and not _of_others(action, form):
                return self._ec2(environ, start_response, action, form, key)
            if (caller := self._caller(key)) and (body := self._refused_by_ec2(caller, action, form)):
                return _send(start_response, 403, body)
        elif service == "s3":
            return self._s3(environ, start_response, key)
        elif service == "sts" and action == "AssumeRole" and not refusals.of_sts(action, form):
            return self._assume_role(environ, start_response, form, self._caller(key), key)
        elif (caller := self._caller(key)) and (refused := self._refusal(caller, service, action, environ)):
            return _send(start_response, 403, _denied(service, refused))
        elif action == "GetCallerIdentity" and (caller := self.rulebook.caller_of(key)):
            return _send(start_response, 200, self._identity(caller))
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        if target == "AWSEC2InstanceConnectService.SendSSHPublicKey":
            status, document = self._send_ssh_key(environ)
            return _send(start_response, status, json.dumps(document).encode())
        if target and (answered := self._account(environ, target)):
            return _send(start_response, answered[0], json.dumps(answered[1]).encode())
        if self.batch is not None and (service == "batch" or target.startswith("Logs_20140328.")):
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            path = environ.get("PATH_INFO", "")
            answer = self.batch.answer(path, body) if service == "batch" else self.batch.answer_logs(target, body)
            return _send(start_response, answer[0], json.dumps(answer[1]).encode())
        if service == "scheduler":
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            status, document = self.schedules.answer(environ["REQUEST_METHOD"], environ.get("PATH_INFO", ""), body)
            return _send(start_response, status, json.dumps(document).encode())
        if service == "elasticfilesystem":
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            request = environ["REQUEST_METHOD"], environ.get("PATH_INFO", ""), environ.get("QUERY_STRING", "")
            status, document = self.efs.answer(*request, body)
            return _send(start_response, status, b"" if status == 204 else json.dumps(document).encode())
        if service == "iam" and (fault := refusals.of_iam(action, form, self.rulebook.account)):
            return _send(start_response, fault.status, _iam_error(fault.code, fault.message))
        if service == "sts" and (fault := refusals.of_sts(action, form)):
            return _send(start_response, fault.status, _iam_error(fault.code, fault.message))
        if service == "iam" and (full := self.account.size_fault(action, form)):
            return _send(start_response, 409, _iam_error("LimitExceeded", full))
        if service == "iam":
            self.account.note_iam(action, form.get("RoleName" if action == "CreateRole" else "InstanceProfileName", ""))
        if action == "ImportKeyPair" and not is_importable(form.get("PublicKeyMaterial", "")):
            body = wire.error("InvalidKey.Format", "Key is not in valid OpenSSH public key format", str(uuid.uuid4()))
            return _send(start_response, 400, body)
        if service and service not in _KNOWN_SERVICES:  # moto would print and raise
            return _send(start_response, 400, b'{"__type": "UnknownOperationException", "message": "not rehearsed"}')
        return self._forward(environ, start_response, f"{service}:{action or environ['REQUEST_METHOD']}", key)

    def _send_ssh_key(self, environ: Environ) -> tuple[int, dict[str, Any]]:
        """As the EC2 Instance Connect API answers it."""
        parameters = json.loads(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)) or b"{}")
        record = self.rulebook.instance(str(parameters.get("InstanceId")))
        key = str(parameters.get("SSHPublicKey", "")).strip()
        if record is None:
            return 400, {"__type": "EC2InstanceNotFoundException", "Message": "The instance could not be found."}
        if record.state != "running":
            message = f"The instance is in the state {record.state}."
            return 400, {"__type": "EC2InstanceStateInvalidException", "Message": message}
        if not re.fullmatch(r"(ssh-(rsa|ed25519)) [A-Za-z0-9+/=]+( [^\n]*)?", key) or not parameters.get(
            "InstanceOSUser"
        ):
            return 400, {"__type": "InvalidArgsException", "Message": "One of the parameters is not valid."}
        if not self.send_key(record.id, key):
            return 500, {"__type": "EC2InstanceUnavailableException", "Message": "The instance does not answer."}
        return 200, {"RequestId": str(uuid.uuid4()), "Success": True}

    def public_key(self, key_pair: str) -> str:
        """The public key of a key pair of the account, "" where there is none."""
        pairs = ec2_backends[self.rulebook.account][self.rulebook.region].key_pairs
        return str(pairs[key_pair].public_key).strip() if key_pair in pairs else ""

    def _account(self, environ: Environ, target: str) -> tuple[int, dict[str, Any]] | None:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        return self.account.answer(target, body)

    def _nfs(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Asked by the machines' own mount and getent, with the key that names a machine's metadata service."""
        key = _header(environ, "X-Machine-Key").encode()
        with self._metadata_lock:
            keys = [server.key.encode() for server in self._metadata.values()]
        if not any(hmac.compare_digest(key, machine_key) for machine_key in keys):
            return _send(start_response, 403, b"")
        parameters = dict(parse_qsl(environ.get("QUERY_STRING", "")))
        answer = self.efs.mountable(parameters.get("host", ""), parameters.get("instance", ""))
        return _send(start_response, 200, json.dumps(answer).encode())

    def _ordered(self, environ: Environ, start_response: StartResponse, caller: str | None) -> Iterable[bytes]:
        """People give orders, their instances do not."""
        assert self.control is not None
        if caller is not None and not caller.startswith("user/"):
            return _send(start_response, 403, b"it is an instance's")
        try:
            parameters = dict(parse_qsl(environ.get("QUERY_STRING", "")))
            answer = self.control(environ["PATH_INFO"].removeprefix("/_cloud/"), parameters)
        except (KeyError, ValueError) as fault:
            return _send(start_response, 400, str(fault.args[0]).encode())
        return _send(start_response, 200, json.dumps(answer).encode())

    def _ec2(
        self, environ: Environ, start_response: StartResponse, action: str, form: dict[str, str], key: str
    ) -> Iterable[bytes]:
        request_id = str(uuid.uuid4())
        try:
            params = _parameters(action, form)
            role_name = self.keys.get(key)  # a role's; an instance's are the rule book's to ask for
            with self.rulebook.inside():
                refused = self.authorization.ec2(action, params, role_name)
            if refused:
                raise ApiError("UnauthorizedOperation", refused, 403)
            result = self.rulebook.call(action, params, self.rulebook.caller_of(key))
            return _send(start_response, 200, wire.answer(action, result, request_id), request_id)
        except ApiError as error:
            return _send(start_response, error.status, wire.error(error.code, error.message, request_id), request_id)
        except ReplyLost:
            raise _hang_up(environ) from None

    def _assume_role(
        self, environ: Environ, start_response: StartResponse, form: dict[str, str], caller: str | None, key: str
    ) -> Iterable[bytes]:
        if caller is not None and not self.sessions.may_assume(caller, form):
            return _send(start_response, 403, sessions.refusal(form))
        answer = b"".join(self._forward(environ, start_response, "sts:AssumeRole", key))
        self.sessions.note(form, answer)
        return [answer]

    def _refusal(self, caller: str, service: str, action: str, environ: Environ) -> str:
        """What is said to a caller whose policies do not allow this call of a service besides EC2 and S3."""
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        operation = action or environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[2] or environ["REQUEST_METHOD"]
        return self.authorization.request(caller, service, operation, body, environ.get("PATH_INFO", ""))

    def _refused_by_ec2(self, caller: str, action: str, form: dict[str, str]) -> bytes:
        """The answer to a caller whose policies do not allow this call of EC2's that moto answers."""
        try:
            refused = self.authorization.ec2(action, wire.parameters(action, form), caller)
        except (KeyError, ValueError, OperationNotFoundError):
            return b""  # moto says what is wrong with it
        return wire.error("UnauthorizedOperation", refused, str(uuid.uuid4())) if refused else b""

    def _policies(self, role: str) -> list[Mapping[str, Any]]:
        """Of the role as it stands in the account; one that `fleetctl request` has not made may do what that one may,
        and one with policies of somebody else's may do everything."""
        world = self.rulebook.world
        role_record = next(
            (candidate for candidate in iam_backends[world.account]["aws"].roles.values() if candidate.name == role),
            None,
        )
        if role_record is None:
            store = StoreUrl("*", "")
            job = role.removeprefix(policies.JOB_ROLE) if role.startswith(policies.JOB_ROLE) else ""
            scope = policies.Scope(world.account, world.region, StoreUrl("*", job) if job else store, job=job)
            documents = (policies.instance_role, policies.instance_with_rescue, policies.instance_of_sweep)
            return [document(scope) for document in documents]
        if role_record.managed_policies or not all(name.startswith("spotheal-") for name in role_record.policies):
            return [{"Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}]
        return [json.loads(text) if isinstance(text, str) else text for text in role_record.policies.values()]

    def _s3(self, environ: Environ, start_response: StartResponse, key: str) -> Iterable[bytes]:
        if self.store_faults.throttled(environ["REQUEST_METHOD"]):
            body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            return _send(start_response, 503, body)
        request = environ["REQUEST_METHOD"], environ.get("PATH_INFO", ""), environ.get("QUERY_STRING", "")
        if self.authorization.s3(self._caller(key), *request):
            return _send(start_response, 403, _ACCESS_DENIED)
        if young := self.account.bucket_fault(*request):
            return _send(start_response, *young)
        if refusal := refusals.of_s3(environ, self.rulebook.account):
            return _send(start_response, refusal.status, _s3_error(refusal))
        operation = f"s3:{environ['REQUEST_METHOD']} {environ.get('PATH_INFO', '')}"
        if environ["REQUEST_METHOD"] == "PUT" and ({"HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"} & environ.keys()):
            # moto looks and then writes: two claims of one moment would both win. The body is read before the lock.
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or -1)))
            with self._conditional:
                return list(self._forward(environ, start_response, operation, key))
        if request[0] in ("GET", "HEAD") and not self.authorization.tells_what_is_missing(
            self._caller(key), request[1]
        ):
            return self._hiding_what_is_missing(environ, start_response, operation, key)
        return self._forward(environ, start_response, operation, key)

    def _hiding_what_is_missing(
        self, environ: Environ, start_response: StartResponse, operation: str, key: str
    ) -> Iterable[bytes]:
        heads: list[tuple[str, Any]] = []
        answer = self._forward(environ, lambda status, headers, _=None: heads.append((status, headers)), operation, key)
        body = b"".join(answer)
        if heads[0][0].startswith("404") and b"NoSuchBucket" not in body:
            return _send(start_response, 403, b"" if environ["REQUEST_METHOD"] == "HEAD" else _ACCESS_DENIED)
        start_response(*heads[0])
        return [body]

    def _forward(self, environ: Environ, start_response: StartResponse, operation: str, key: str) -> Iterable[bytes]:
        world = self.rulebook.world
        caller = self.rulebook.caller_of(key)

        def started(status: str, headers: Any, error: Any = None) -> Any:
            self.forwarded.append(Call(operation, caller, world.clock.now(), world.clock.monotonic(), status[:3]))
            return start_response(status, headers, error)

        application: Any = self._moto.get_application(environ)
        body: Iterable[bytes] = application(environ, started)
        return body

    def lend(self, seconds: float) -> dict[str, str]:
        """Temporary credentials of the first of `PEOPLE`, as environment variables: what `aws configure
        export-credentials --format env` prints. They end after so long, and all that they signed ends with them."""
        key = self.rulebook.key_of(f"lent {len(self.ends)}")
        self.keys[key] = next(iter(PEOPLE.values()))
        self.ends[key] = self.rulebook.world.moment() + seconds
        ends = self.rulebook.world.clock.now() + timedelta(seconds=seconds)
        return {**self.rulebook.world.keys.of(key).environment, "AWS_CREDENTIAL_EXPIRATION": rfc3339(ends)}

    def container_credentials(self, container: str, role: str) -> str:
        """The address at which a container finds credentials of its role: nobody else can guess it, as ECS's."""
        key = self.rulebook.key_of(container)
        self.keys[key] = f"role/{role}"
        path = self.rulebook.world.keys.word("container", container)
        self._containers[path] = key
        return f"{self.url}{_ROLES}{path}"

    def _role_credentials(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        instance = self._containers.get(environ["PATH_INFO"].removeprefix(_ROLES))
        if instance is None:
            return _send(start_response, 403, _ACCESS_DENIED)
        ends, key = self.rulebook.world.clock.now() + timedelta(hours=6), self.rulebook.world.keys.of(instance)
        document = {
            "AccessKeyId": key.id,
            "SecretAccessKey": key.secret,
            "Token": key.token,
            "Expiration": rfc3339(ends),
        }
        return _send(start_response, 200, json.dumps(document).encode())

    def _caller(self, key: str) -> str | None:
        """An instance, `role/NAME` for a role's keys from elsewhere, one of the people; None for the owner."""
        return self.keys.get(key) or self.rulebook.caller_of(key)

    def _identity(self, caller: str) -> bytes:
        record = self.rulebook.instance(caller)
        role = record.role if record and record.role else "none"
        account = self.rulebook.account
        return (
            '<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>'
            f"<Arn>arn:aws:sts::{account}:assumed-role/{role}/{caller}</Arn><UserId>AROAREHEARSAL:{caller}</UserId>"
            f"<Account>{account}</Account></GetCallerIdentityResult><ResponseMetadata><RequestId>{uuid.uuid4()}"
            "</RequestId></ResponseMetadata></GetCallerIdentityResponse>"
        ).encode()

    def _zone_of_subnet(self, subnet: str) -> str | None:
        zones: dict[str, dict[str, Any]] = ec2_backends[self.rulebook.account][self.rulebook.region].subnets
        return next((zone for zone, subnets in zones.items() if subnet in subnets), None)


def _denied(service: str, message: str) -> bytes:
    if service in ("iam", "sts", "sns"):
        return _iam_error("AuthorizationError" if service == "sns" else "AccessDenied", message)
    return json.dumps({"__type": "AccessDeniedException", "message": message}).encode()


def _header(environ: Environ, name: str) -> str:
    return str(environ.get(f"HTTP_{name.upper().replace('-', '_')}", ""))


def _iam_error(code: str, message: str) -> bytes:
    error = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
    return f"<ErrorResponse>{error}<RequestId>{uuid.uuid4()}</RequestId></ErrorResponse>".encode()


def _parameters(action: str, form: dict[str, str]) -> dict[str, Any]:
    """As boto3 would have checked them: other clients (and hands) send what it never does."""
    try:
        params = wire.parameters(action, form)
    except ValueError as fault:
        raise ApiError("InvalidParameterValue", str(fault)) from None
    if missing := wire.missing(action, params):
        raise ApiError("MissingParameter", f"The request must contain the parameter {missing}")
    return params


def _form(environ: Environ) -> dict[str, str]:
    """The fields of a form body or of the query; the body is left to be read again."""
    fields = dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True))
    if environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        fields |= dict(parse_qsl(body.decode(), keep_blank_values=True))
    return fields


def _of_others(action: str, form: dict[str, str]) -> bool:
    """Tags of what moto keeps: subnets, images, security groups."""
    resources = [value for name, value in form.items() if name.startswith("ResourceId.")]
    return action in ("CreateTags", "DeleteTags") and bool(resources) and not any(map(tags.owns, resources))


def _s3_error(error: ApiError) -> bytes:
    return f"<Error><Code>{error.code}</Code><Message>{error.message}</Message></Error>".encode()


def _send(start_response: StartResponse, status: int, body: bytes, request_id: str = "") -> Iterable[bytes]:
    headers = [("Content-Type", "text/xml;charset=UTF-8"), ("Content-Length", str(len(body)))]
    if request_id:
        headers.append(("x-amzn-RequestId", request_id))
    start_response(f"{status} {_REASONS.get(status, 'Error')}", headers)
    return [body]


def _hang_up(environ: Environ) -> ConnectionError:
    """End the connection without an answer; werkzeug takes what is raised then for a client that went away."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return ConnectionAbortedError("the reply is lost")
