"""Files whose checksums are all right and whose header or state is what no writer of ours makes: broken, and no more.

Nothing but BrokenCheckpoint may come of them, in any of the store's ways to read, soon and in bounded memory.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from spotheal.training.checkpoint import Loaded, Store
from spotheal.training.slotfile import format
from spotheal.training.slotfile.checksum import checksum
from spotheal.training.slotfile.format import JSON_NESTING_MAX, NESTING_MAX

W = '"w":{"dtype":"U8","shape":[4096],"data_offsets":[0,4096]}'


def crafted(
    state: str = '{"w":{"$tensor":"w"}}',
    info: str = "null",
    tensors: str = W,
    step: str = '"2"',
    chunk_bytes: str = '"4096"',
    checksums: str | None = None,
) -> bytes:
    """A file of 4096 zeros of data; `step`, `chunk_bytes`, `checksums` are JSON as they stand."""
    sums = f'"{checksum(torch.zeros(4096, dtype=torch.uint8)):08x}"' if checksums is None else checksums
    metadata = f'"checksum":"{format.CHECKSUM}","step":{step},"chunk_bytes":{chunk_bytes},"checksums":{sums}'
    metadata += f',"state":{json.dumps(state)},"info":{json.dumps(info)}'
    body = format._BEGIN + format._NO_CRC + f'",{metadata}}},{tensors}}}'.encode()
    room = 8 + len(body) + -(8 + len(body)) % 4096
    whole = bytearray(struct.pack("<Q", room - 8) + body.ljust(room - 8))
    whole[format._CRC_AT : format._CRC_AT + 8] = b"%08x" % zlib.crc32(whole)
    return bytes(whole) + bytes(4096)


def of_shape(shape: str) -> str:
    return '"w":{"dtype":"U8","shape":' + shape + ',"data_offsets":[0,4096]}'


def in_lists(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """With a good checkpoint of step 1."""
    store = Store(tmp_path)
    store.save_now(1, {"good": 1}, info={"of": "the good"}, best=True)
    yield store
    store.close()


def loaded_of(store: Store, content: bytes) -> Loaded:
    store.slots.path(2).write_bytes(content)
    loaded = store.load()
    assert loaded is not None
    return loaded


def test_the_crafted_file_itself_is_whole(store: Store) -> None:
    assert loaded_of(store, crafted()).step == 2
    assert store.newest_info() is None and store.set_aside == []


NO_NUMBERS = ["Infinity", "-Infinity", "NaN", "2.0", "true", "null", "2", '"-2"', '"2.0"', '" 2"', '"1_0"', '"٢"',
              "[2]", '"' + "9" * 19 + '"', "9" * 400, '"' + "9" * 5000 + '"']  # fmt: skip
HEADERS = {
    **{f"step {text[:12]}": crafted(step=text) for text in NO_NUMBERS},
    **{f"chunk_bytes {text[:12]}": crafted(chunk_bytes=text) for text in [*NO_NUMBERS, "4096", "4096.0", '"4095"']},
    **{f"checksums {text}": crafted(checksums=text) for text in ("Infinity", '["00000000"]', '"+0000001"', '"0"', "5")},
    **{
        f"shape {text[:20]}": crafted(tensors=of_shape(text))
        for text in ("[4096.0]", "[true,4096]", "[Infinity]", "[-1,-4096]", '"4096"', '{"4096":1}', "4096", "null",
                     "[" + "9" * 400 + "]", "[" + "1," * 64 + "4096]",
                     "[" + ",".join(["4611686018427387903"] * 100_000) + "]")
    },
    "too deep an info": crafted(info=in_lists(JSON_NESTING_MAX + 1)),
    "far too deep a state": crafted(state=in_lists(100_000)),
}  # fmt: skip
STATES = {
    "float of 400 digits": '{"$float":1' + "0" * 400 + "}",
    "float of a bool": '{"$float":true}',
    "float of no number": '{"$float":"abc"}',
    "bytes of a number": '{"$bytes":5}',
    "bytes of no base64": '{"$bytes":"a"}',
    "tuple of a text": '{"$tuple":"abc"}',
    "set of a set": '{"$set":[{"$set":[]}]}',
    "dict of triples": '{"$dict":[[1,2,3]]}',
    "tensor of a list": '{"$tensor":["w"]}',
    "no such tensor": '{"$tensor":"' + "q" * 100_000 + '"}',
    "no such array": '{"$array":"q"}',
    "unknown mark": '{"$' + "x" * 100_000 + '":[]}',
    "lists": '{"a":' + in_lists(NESTING_MAX) + "}",
    "dicts": '{"a":' * (NESTING_MAX + 1) + "1" + "}" * (NESTING_MAX + 1),
    "tuples": '{"$tuple":[' * (NESTING_MAX + 1) + "]}" * (NESTING_MAX + 1),
    "frozen sets": '{"$frozenset":[' * (NESTING_MAX + 1) + "]}" * (NESTING_MAX + 1),
    "dicts of numbers": '{"$dict":[[1,' * (NESTING_MAX + 1) + "1" + "]]}" * (NESTING_MAX + 1),
    "keys": '{"$dict":[[' + '{"$tuple":[' * NESTING_MAX + "]}" * NESTING_MAX + ",1]]}",
}


@pytest.mark.parametrize("name", [*HEADERS, *STATES])
def test_it_is_broken_in_every_way_to_read_it(name: str, store: Store) -> None:
    content = HEADERS.get(name) or crafted(state=STATES[name])
    store.best.path(2).write_bytes(content)
    best = store.load_best()
    assert best is not None and best.step == 1
    store.slots.path(2).write_bytes(content)
    if name in HEADERS:
        assert store.newest_info() == {"of": "the good"}
    began = time.monotonic()
    assert loaded_of(store, content).step == 1
    assert time.monotonic() - began < 5
    [(_, what)] = store.set_aside
    assert len(what) < 400


def test_a_bfloat16_is_no_array(store: Store) -> None:
    tensors = '"w":{"dtype":"BF16","shape":[2048],"data_offsets":[0,4096]}'
    assert loaded_of(store, crafted('{"$array":"w"}', tensors=tensors)).step == 1


def test_64_dimensions_are_read(store: Store) -> None:
    loaded = loaded_of(store, crafted(tensors=of_shape("[" + "1," * 63 + "4096]")))
    assert loaded.tree["w"].dim() == 64


def test_a_tensor_or_array_that_is_named_often_is_there_once(store: Store) -> None:
    state = "[" + ",".join(['{"$array":"w"}', '{"$tensor":"w"}', '{"$tuple":[{"$array":"w"}]}'] * 20_000) + "]"
    tree = loaded_of(store, crafted(state)).tree
    assert len(set(map(id, tree[::3]))) == len({id(one) for (one,) in tree[2::3]}) == 1
    assert tree[0] is tree[2][0] and len(set(map(id, tree[1::3]))) == 1
    assert isinstance(tree[0], numpy.ndarray) and tree[0].nbytes == 4096
