"""Results are fetched whole or not at all, and nowhere but below their folder."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from moto import mock_aws

from spotheal.agent.aws.s3 import Store
from spotheal.agent.protocol.errors import ConfigError, NotFound, Retryable, SpothealError
from spotheal.agent.protocol.names import StoreUrl
from spotheal.fleet.results import results
from spotheal.fleet.results.results import Fetched, Refused
from spotheal.fleet.results.results_efs import _copy
from spotheal.fleet.run.runs import Run


class Cut(io.BytesIO):
    """A body whose connection ends after so many bytes."""

    def __init__(self, body: bytes, at: int) -> None:
        super().__init__(body[:at])

    def iter_chunks(self, _: int) -> Iterator[bytes]:
        yield self.read()
        from botocore.exceptions import ReadTimeoutError

        raise ReadTimeoutError(endpoint_url="https://s3")


class Client:
    """boto3's, with what a test changes."""

    def __init__(self, real: Any) -> None:
        self.real, self.ranges = real, list[str]()
        self.cut_at: int | None = None
        self.spoil = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def get_object(self, **keywords: Any) -> Any:
        self.ranges.append(keywords["Range"])
        answer = self.real.get_object(**keywords)
        if self.cut_at is not None:
            answer["Body"] = Cut(answer["Body"].read(), self.cut_at)
        if self.spoil:
            answer["Body"] = self._spoiled(answer["Body"].read())
        return answer

    @staticmethod
    def _spoiled(body: bytes) -> Any:
        class Body:
            def iter_chunks(self, _: int) -> Iterator[bytes]:
                yield bytes([body[0] ^ 1]) + body[1:]

        return Body()


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        yield client


@pytest.fixture
def run(s3: Any, request: pytest.FixtureRequest) -> Run:
    return Run("cifar", "R", Store(Client(s3), StoreUrl("bucket", f"{abs(hash(request.node.name))}/cifar/R")))


def put(run: Run, name: str, body: bytes) -> None:
    run.store.put_bytes(f"results/{name}", body)


def fetched(run: Run, folder: Path) -> dict[str, Fetched | SpothealError]:
    source = results.objects(run)
    return {one.name: came for one, came in results.fetch(source, source.list(), folder, lambda *_: None)}


def test_what_is_stored_comes_with_its_folders_and_is_checked(run: Run, tmp_path: Path) -> None:
    put(run, "model.bin", b"m" * 3_000_000)
    put(run, "plots/loss.svg", b"<svg/>")
    put(run, "empty", b"")
    came = fetched(run, tmp_path / "out")
    assert b"m" * 3_000_000 == (tmp_path / "out/model.bin").read_bytes()
    assert b"" == (tmp_path / "out/empty").read_bytes()
    assert ["crc32"] * 3 == [one.checked for one in came.values() if isinstance(one, Fetched)]
    again = fetched(run, tmp_path / "out")
    assert [True] * 3 == [one.was_there for one in again.values() if isinstance(one, Fetched)]


def test_progress_counts_every_byte_once(run: Run, tmp_path: Path) -> None:
    put(run, "a", b"a" * 1000)
    put(run, "b", b"b" * 500)
    told: list[tuple[int, int]] = []
    list(results.fetch(results.objects(run), results.objects(run).list(), tmp_path, lambda *step: told.append(step)))
    assert (1500, 1500) == told[-1]


def test_a_download_that_is_cut_off_looks_like_nothing_and_goes_on_where_it_was(run: Run, tmp_path: Path) -> None:
    put(run, "model.bin", os.urandom(5000))
    client = run.store.client
    client.cut_at = 2000
    (came,) = fetched(run, tmp_path).values()
    assert isinstance(came, Retryable)
    assert not (tmp_path / "model.bin").exists()
    client.cut_at = None
    (came,) = fetched(run, tmp_path).values()
    assert isinstance(came, Fetched)
    assert ["bytes=0-", "bytes=2000-"] == client.ranges
    assert ["model.bin"] == [path.name for path in tmp_path.iterdir()]


def test_the_rest_of_another_object_is_not_put_behind_the_start_of_this_one(run: Run, tmp_path: Path) -> None:
    put(run, "model.bin", b"old" * 1000)
    run.store.client.cut_at = 100
    fetched(run, tmp_path)
    run.store.client.cut_at = None
    put(run, "model.bin", b"new" * 1000)
    fetched(run, tmp_path)
    assert b"new" * 1000 == (tmp_path / "model.bin").read_bytes()
    assert "bytes=0-" == run.store.client.ranges[-1]


def test_what_comes_damaged_is_thrown_away(run: Run, tmp_path: Path) -> None:
    put(run, "model.bin", b"m" * 1000)
    run.store.client.spoil = True
    (came,) = fetched(run, tmp_path).values()
    assert isinstance(came, Retryable) and "checksum" in came.message
    assert [] == list(tmp_path.iterdir())


def test_a_file_here_of_the_same_size_and_other_content_is_fetched_again(run: Run, tmp_path: Path) -> None:
    put(run, "model.bin", b"m" * 1000)
    (tmp_path / "model.bin").write_bytes(b"x" * 1000)
    (came,) = fetched(run, tmp_path).values()
    assert isinstance(came, Fetched) and not came.was_there
    assert b"m" * 1000 == (tmp_path / "model.bin").read_bytes()


@pytest.mark.parametrize("part_mib", [8, 5])
def test_what_was_uploaded_in_parts_is_checked_by_its_parts(run: Run, tmp_path: Path, part_mib: int) -> None:
    body = os.urandom(1 << 20) * 11
    key = f"{run.store.url.prefix}/results/large.bin"
    config = TransferConfig(multipart_threshold=1 << 20, multipart_chunksize=part_mib << 20)
    run.store.client.real.upload_fileobj(io.BytesIO(body), "bucket", key, Config=config)
    assert "-" in run.store.client.head_object(Bucket="bucket", Key=key)["ETag"]
    (came,) = fetched(run, tmp_path).values()
    assert isinstance(came, Fetched) and "md5" == came.checked
    (tmp_path / "large.bin").write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    (came,) = fetched(run, tmp_path).values()
    assert isinstance(came, Fetched) and not came.was_there  # it was found to be another, and fetched anew


@pytest.mark.parametrize(
    "name", ["../escape", "a/../../escape", "/etc/passwd", "a//b", "a\\b", "nul\x00", "line\nbreak", "n" * 300, "."]
)
def test_a_hostile_name_is_refused_and_keeps_no_other(run: Run, tmp_path: Path, name: str) -> None:
    with pytest.raises(Refused):
        results.place(tmp_path, name)


def test_one_refused_name_keeps_no_other_result(run: Run, tmp_path: Path) -> None:
    put(run, "../escape", b"x")
    put(run, "good", b"y")
    came = fetched(run, tmp_path / "out")
    assert isinstance(came["../escape"], Refused)
    assert isinstance(came["good"], Fetched)
    assert ["out"] == [path.name for path in tmp_path.iterdir()]


def test_a_link_that_leads_out_of_the_folder_is_not_followed(run: Run, tmp_path: Path) -> None:
    put(run, "sub/model.bin", b"m")
    put(run, "link", b"m")
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out/sub").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "out/link").symlink_to(tmp_path / "elsewhere/file")
    came = fetched(run, tmp_path / "out")
    assert [True, True] == [isinstance(one, Refused) for one in came.values()]
    assert [] == list((tmp_path / "elsewhere").iterdir())


def test_a_name_that_is_a_file_here_and_a_folder_there_is_said(run: Run, tmp_path: Path) -> None:
    put(run, "a/b", b"x")
    (tmp_path / "a").write_text("a file")
    (came,) = fetched(run, tmp_path).values()
    assert isinstance(came, SpothealError) and "a/b" in came.message


def test_a_folder_that_cannot_be_made_is_the_users_to_change(run: Run, tmp_path: Path) -> None:
    put(run, "a.pt", b"a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        fetched(run, tmp_path / "file")


def test_results_that_the_disk_cannot_hold_are_refused_before_a_byte_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "free_bytes", lambda folder: 1500)
    for name in ("a", "b"):
        put(run, name, b"x" * 1000)
    with pytest.raises(ConfigError, match=r"2\.0 kB are to be fetched, and the disk of .* has 1\.5 kB free"):
        fetched(run, tmp_path)
    assert [] == list(tmp_path.iterdir())
    (tmp_path / ".a.00000000.partial").write_bytes(b"x" * 600)
    assert all(isinstance(one, Fetched) for one in fetched(run, tmp_path).values()), "what is here already counts"


def test_a_file_that_has_no_end_is_read_no_further_than_its_size(tmp_path: Path) -> None:
    """The machine's files are the trainer's; one can grow for as long as it is read."""
    reads: list[int] = []

    def read() -> bytes:
        reads.append(1)
        assert len(reads) < 100
        return b"x" * 10

    endless = results.Result("a", 25, None, "0" * 64)
    with pytest.raises(Retryable, match="came damaged"):
        _copy(endless, tmp_path / "a", read, lambda offset: None, lambda count: None)
    assert len(reads) == 3


def test_only_what_a_pattern_names_is_chosen(run: Run) -> None:
    for name in ("model.pt", "plots/loss.svg", "plots/accuracy.svg"):
        put(run, name, b"x")
    found = results.objects(run).list()
    assert ["plots/accuracy.svg", "plots/loss.svg"] == [one.name for one in results.chosen(found, ["plots/*"])]
    assert ["model.pt"] == [one.name for one in results.chosen(found, ["*.pt"])]
    with pytest.raises(NotFound, match="nope"):
        results.chosen(found, ["nope"])
