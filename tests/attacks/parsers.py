"""Every parser of what others write: `PARSERS` are attacked, `TRUSTED` read what nobody else can write.

A call that parses (`CALLS`) stands in a function of one of the two tables: test_parsers.py holds that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spotheal.agent.aws.imds import _object, _rebalance, _spot_action
from spotheal.agent.aws.s3 import Store
from spotheal.agent.batch.copies import _entries_of
from spotheal.agent.files.folders import Folders
from spotheal.agent.life.preflight import last_saved_at
from spotheal.agent.machine.devices import parse_lsblk
from spotheal.agent.processes.output import Lines
from spotheal.agent.protocol import bounded_json
from spotheal.agent.protocol.clock import parse_rfc3339
from spotheal.agent.protocol.contract import Notice, Progress
from spotheal.agent.protocol.errors import ConfigError, Retryable
from spotheal.agent.protocol.instance_config import InstanceConfig
from spotheal.agent.protocol.job_values import policy_fault
from spotheal.agent.protocol.names import StoreUrl
from spotheal.agent.protocol.redaction import Redaction
from spotheal.agent.record import metrics_shipping
from spotheal.agent.record.ledger import read_events
from spotheal.agent.record.run_state import RunMemory
from spotheal.agent.repository.working_copy import Record, _lines
from spotheal.agent.trainer import torn_saves
from spotheal.agent.trainer.progress_files import drop_metrics_after, progress_of
from spotheal.agent.trainer.set_aside import SaveShelf
from spotheal.agent.trainer.written_files import Record as FilesRecord
from spotheal.agent.volume.read_ahead import recorded
from spotheal.fleet.account import environments
from spotheal.fleet.files import jsonfile, values
from spotheal.fleet.files.config import is_job_file, read_job
from spotheal.fleet.logs.logs import _plain
from spotheal.fleet.report.series import json_lines, series_of
from spotheal.fleet.sweep import entries
from spotheal.training import params
from spotheal.training.params import BadParams
from spotheal.training.report import _belongs
from spotheal.training.shards.sharded_manifest import Manifest
from spotheal.training.slotfile.format import BrokenCheckpoint, header_length, parse_header
from spotheal.training.tracking import _records
from spotheal.userdata import report

CALLS = {
    "json.loads", "json.load", "tomllib.loads", "tomllib.load", "yaml.load", "yaml.safe_load", "pickle.loads",
    "pickle.load", "marshal.loads", "csv.reader", "tarfile.open", "zipfile.ZipFile", "struct.unpack",
    "struct.unpack_from", "int.from_bytes", "datetime.fromisoformat", "datetime.datetime.fromisoformat",
    "ElementTree.fromstring", "documents.parse", "documents.parse_object", "parse", "parse_object",
}  # fmt: skip
_STORE = Store(None, StoreUrl("bucket", "job/run"))
_TOP = Path(tempfile.mkdtemp(prefix="parsers-"))
_FOLDERS = Folders.at(_TOP, "/volume")
_FOLDERS.make(None)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _document(data: bytes) -> Any:
    """What a tenant's object is to the functions behind `Store.get_json`; none of them meets anything else."""
    return _STORE._json("key", data)


def _filed(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    def attacked(data: bytes) -> object:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return read()

    return attacked


class _Objects(report.Aws):
    """A bootstrap's store in which every object is `data`."""

    def __init__(self, data: bytes) -> None:
        super().__init__("us-west-2", "s3://bucket/job/run", None)  # type: ignore[arg-type]
        self._data = data

    def listed(self, prefix: str) -> list[tuple[str, str]]:
        return [(prefix, "")]

    def store(self, *_: Any, **__: Any) -> bytes:
        return self._data


def _torn(name: str) -> Callable[[bytes], object]:
    folder = _TOP / name
    return _filed(folder / f"step-7{name}", lambda: torn_saves.torn_saves([folder]))


# The function that parses -> (what gives it any bytes, the errors that it documents).
PARSERS: dict[str, tuple[Callable[[bytes], object], tuple[type[Exception], ...]]] = {
    "agent/protocol/bounded_json.py:parse": (bounded_json.parse, (ValueError,)),
    "agent/protocol/bounded_json.py:parse_object": (bounded_json.parse_object, (ValueError,)),
    "agent/protocol/clock.py:parse_rfc3339": (lambda data: parse_rfc3339(_text(data)), (ValueError,)),
    "agent/protocol/contract.py:Progress.from_json": (
        lambda data: Progress.from_json(_text(data)).to_json(),
        (ValueError,),
    ),
    "agent/protocol/contract.py:Notice.from_json": (lambda data: Notice.from_json(_text(data)), (ValueError,)),
    "agent/trainer/progress_files.py:progress_of": (
        _filed(_FOLDERS.run_dir / "progress.json", lambda: progress_of(_FOLDERS.run_dir / "progress.json")), (),
    ),
    "agent/trainer/progress_files.py:_is_dropped": (
        _filed(_FOLDERS.metrics_file, lambda: drop_metrics_after(_FOLDERS.metrics_file, 3)), (),
    ),
    "agent/record/metrics_shipping.py:_metrics": (
        _filed(_FOLDERS.metrics_file, lambda: metrics_shipping.Metrics(_FOLDERS.metrics_file).read()), (),
    ),
    "agent/record/metrics_shipping.py:thinned": (lambda data: metrics_shipping.thinned(data, 1 << 12), ()),
    "agent/trainer/torn_saves.py:_safetensors_bytes": (_torn(".safetensors"), ()),
    "agent/trainer/torn_saves.py:_hdf5_bytes": (_torn(".h5"), ()),
    "agent/trainer/torn_saves.py:_has_zip_end": (_torn(".pt"), ()),
    "agent/processes/output.py:Lines.feed": (lambda data: (lines := Lines()).feed(data) + lines.rest(), ()),
    "agent/protocol/redaction.py:_parts": (lambda data: Redaction().text(_text(data[:8192])), ()),
    "agent/record/ledger.py:_event": (lambda data: read_events(_text(data)), ()),
    "agent/record/run_state.py:RunMemory.read": (
        _filed(_FOLDERS.private / "run.json", lambda: RunMemory.read(_FOLDERS, "run")), (),
    ),
    "agent/repository/working_copy.py:Record.read": (
        _filed(_FOLDERS.private / "working-copy.json", lambda: Record.read(_FOLDERS.private / "working-copy.json")), (),
    ),
    "agent/repository/working_copy.py:_lines": (lambda data: _lines(_text(data).splitlines()), ()),
    "agent/trainer/written_files.py:Record.read": (
        _filed(_FOLDERS.private / "files.json", lambda: FilesRecord.read(_FOLDERS.private / "files.json", "run")), (),
    ),
    "agent/volume/read_ahead.py:recorded": (lambda data: recorded(_text(data), 1 << 40), (ValueError,)),
    "agent/trainer/set_aside.py:SaveShelf.recall": (
        _filed(_FOLDERS.private / "set-aside.json", lambda: SaveShelf(_FOLDERS).recall(lambda since: False)), (),
    ),
    "agent/aws/s3.py:Store._json": (_document, (Retryable,)),
    "agent/life/preflight.py:last_saved_at": (lambda data: last_saved_at(_document(data)), (Retryable,)),
    "agent/batch/copies.py:_entries_of": (lambda data: _entries_of(_document(data)), (Retryable, ValueError)),
    "agent/protocol/instance_config.py:InstanceConfig.from_json": (
        lambda data: InstanceConfig.from_json(_text(data), source="x"), (ConfigError,),
    ),
    "agent/machine/devices.py:parse_lsblk": (lambda data: parse_lsblk(_text(data)), (Retryable,)),
    "agent/aws/imds.py:_object": (lambda data: _object(_text(data), "x"), (Retryable,)),
    "agent/aws/imds.py:_spot_action": (lambda data: _spot_action(_text(data)), (Retryable,)),
    "agent/aws/imds.py:_rebalance": (lambda data: _rebalance(_text(data)), (Retryable,)),
    "agent/protocol/job_values.py:policy_fault": (lambda data: policy_fault(_text(data)), ()),
    "fleet/logs/logs.py:_plain": (lambda data: _plain(_text(data)), ()),
    "fleet/report/series.py:json_lines": (lambda data: series_of(json_lines(_text(data))), ()),
    "fleet/sweep/entries.py:_from_json": (lambda data: entries.parse(_text(data)[:4096], "x"), (ConfigError,)),
    "training/slotfile/format.py:parse_header": (lambda data: parse_header(data, 1 << 20), (BrokenCheckpoint,)),
    "training/shards/sharded_manifest.py:Manifest.parse": (Manifest.parse, (BrokenCheckpoint,)),
    "training/report.py:_belongs": (lambda data: _belongs(data, 3, 1), ()),
    "training/slotfile/format.py:header_length": (lambda data: header_length(data[:8], 1 << 20), (BrokenCheckpoint,)),
    "training/params.py:_parsed": (lambda data: params._parsed(data[:4096], "list.yaml"), (BadParams,)),
    "training/tracking.py:_records": (lambda data: list(_records(data)), ()),
    "fleet/files/config.py:read_job": (_filed(_TOP / "job.toml", lambda: read_job(_TOP / "job.toml")), (ConfigError,)),
    "fleet/files/config.py:is_job_file": (_filed(_TOP / "job.toml", lambda: is_job_file(_TOP / "job.toml")), ()),
    "fleet/account/environments.py:_project": (
        _filed(_TOP / "p.toml", lambda: environments._project(_TOP / "p.toml")),
        (),
    ),
    "fleet/files/jsonfile.py:parse": (lambda data: jsonfile.parse(_text(data)[:4096], "x"), ()),
    "fleet/files/values.py:_time": (lambda data: values._time(_text(data)), ()),
    # Each failure of a bootstrap is counted, one of its own too; the agent puts no such time into status.json.
    "userdata/report.py:Aws.document": (
        lambda data: report.last_saved_at(_Objects(data).document("status")), (RecursionError, OverflowError),
    ),
    "userdata/report.py:last_saved_at": (
        lambda data: report.last_saved_at(bounded_json.parse(data)), (ValueError, OverflowError),
    ),
}  # fmt: skip

# The function that parses -> why nobody but us, AWS or the operator writes what it reads.
TRUSTED: dict[str, str] = {
    "agent/machine/efs.py:Efs.folder": "the output of efs_files.py, a program of the agent's own",
    "agent/machine/efs.py:_spoken": "the output of efs_files.py, a program of the agent's own",
    "agent/machine/efs_files.py:main": "the agent's own order, on standard input",
    "agent/processes/sandbox_exec.py:main": "the agent's own order, in memory",
    "agent/repository/carry_over.py:main": "the agent's own order, as an argument; it runs as the trainer's user",
    "agent/repository/carry_over.py:_files_in": "root's record; it runs as the trainer's user",
    "agent/processes/group.py:_start_by_launcher": "what sandbox_exec.py says before the exec of foreign code",
    "agent/machine/host.py:Host._mount_entry": "findmnt's output",
    "agent/trainer/interpreter.py:probe": "by `bounded_json`, whose errors it takes: what a trainer's Python prints",
    "agent/repository/checkout.py:_is_complete": "by `bounded_json`: the agent's own mark",
    "agent/cage/imds_proxy.py:Relay._is_valid": "a token that the relay has signed: the signature is looked at first",
    "agent/volume/read_ahead.py:main": "the agent's own order, on standard input",
    "agent/volume/read_ahead.py:read_all": "root's record",
    "agent/cage/secrets.py:_field": "a secret of the operator's",
    "agent/protocol/redaction.py:_parts": "a secret of the operator's",
    "agent/batch/place.py:_task": "ECS's own answer, bounded to 1 MiB",
    "fleet/request/wheelhouse.py:build": "the operator's own cache",
    "fleet/request/wheelhouse.py:_zip": "it writes an archive",
    "fleet/volumes/uploading.py:parts.write": "it writes an archive",
    "fleet/batch/submitting.py:_record": "what the same command has made",
    "fleet/account/roles.py:missing_instance_role": "our own policy",
    "fleet/account/roles.py:missing_trainer_role": "our own policy",
    "fleet/batch/roles.py:missing": "our own policy",
    "fleet/files/config.py:_with_policy": "the operator's file",
    "fleet/verbs/iam.py:_policy": "the operator's file",
    "fleet/verbs/init.py:_check_job": "what the same command has made",
    "fleet/account/prices.py:_listed_price": "AWS's answer",
    "training/__main__.py:read_finished": "the trainer reads what the trainer wrote",
    "training/slotfile/format.py:_values": "part of a header whose checksum holds; parse_header takes its errors",
    "training/yaml_list.py:load": "part of sweep/entries.py and params.py, which take its errors",
    "userdata/bootstrap.py:fetch": "the manifest, by the sha256 in user data",
    "userdata/bootstrap.py:unzip": "a wheel, by the sha256 in the manifest",
    "userdata/prepare.py:device_of": "lsblk's output",
    "userdata/prepare.py:main": "the operator's own order, in user data",
    "userdata/prepare.py:unpack": "the operator's own archive, by Python's filter for data",
    "userdata/report.py:Metadata.credentials": "the metadata service's answer",
    "userdata/report.py:Metadata.instance": "the metadata service's answer",
    "userdata/report.py:configuration": "user data",
    "userdata/start.py:main": "user data",
}
