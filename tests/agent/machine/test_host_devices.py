"""Which disk is the volume: by its serial, and never because it is the only one left."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import pytest

from spotheal.agent.machine.devices import LINK_PREFIX, Device, choose, parse_lsblk, plain_serial, serial_of
from spotheal.agent.protocol.errors import Fatal, Retryable

VOLUME = "vol-0123456789abcdef0"
SERIAL = "vol0123456789abcdef0"
GIB = 2**30


def disk(path: str, serial: str = "", *, children: bool = False) -> Device:
    return Device(path, serial, 100 * GIB, "", "", (), children)


# A g4dn.xlarge as lsblk 2.37 shows it: root volume, instance-store disk, our volume.
G4DN = json.dumps({"blockdevices": [
    {"name": "loop0", "path": "/dev/loop0", "serial": None, "size": 26214400, "fstype": None, "uuid": None,
     "mountpoints": ["/snap/amazon-ssm-agent/5163"], "type": "loop"},
    {"name": "nvme1n1", "path": "/dev/nvme1n1", "serial": "AWS6AF4B6C2CC20D3A1F", "size": 125000000000, "fstype": None,
     "uuid": None, "mountpoints": [None], "type": "disk"},
    {"name": "nvme0n1", "path": "/dev/nvme0n1", "serial": "vol0aaaaaaaaaaaaaaaa", "size": 107374182400, "fstype": None,
     "uuid": None, "mountpoints": [None], "type": "disk", "children": [
         {"name": "nvme0n1p1", "path": "/dev/nvme0n1p1", "serial": None, "size": 107373116928, "fstype": "ext4",
          "uuid": "0a", "mountpoints": ["/"], "type": "part"}]},
    {"name": "nvme2n1", "path": "/dev/nvme2n1", "serial": SERIAL, "size": 107374182400, "fstype": "xfs", "uuid": "0b",
     "mountpoints": ["/dltraining"], "type": "disk"},
]})  # fmt: skip


def test_the_volume_is_the_disk_with_its_serial() -> None:
    seen = parse_lsblk(G4DN)
    assert choose(seen, {}, VOLUME) == Device(
        "/dev/nvme2n1", SERIAL, 107374182400, "xfs", "0b", ("/dltraining",), False
    )
    assert [device.has_children for device in seen] == [False, False, True, False]


def test_the_other_nvme_is_never_taken() -> None:
    seen = tuple(device for device in parse_lsblk(G4DN) if device.serial != SERIAL)
    assert choose(seen, {}, VOLUME, "/dev/sdf") is None


def test_old_lsblk_prints_numbers_as_text_and_no_path() -> None:
    old = {"blockdevices": [
        {"name": "nvme2n1", "serial": f"{SERIAL} ", "size": "107374182400", "fstype": None, "uuid": None,
         "mountpoint": None},
    ]}  # fmt: skip
    assert parse_lsblk(json.dumps(old)) == (disk("/dev/nvme2n1", SERIAL),)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"blockdevices": [7]}',
                                  '{"blockdevices": [{"name": "a", "size": "x"}]}',
                                  '{"blockdevices": [{"name": "a", "mountpoints": "/"}]}'])  # fmt: skip
def test_an_output_that_is_none_is_retryable(text: str) -> None:
    with pytest.raises(Retryable, match="lsblk"):
        parse_lsblk(text)


@pytest.mark.parametrize("serial", [SERIAL, f"  {SERIAL}  ", f"Amazon Elastic Block Store_{SERIAL}",
                                    f"Amazon_Elastic_Block_Store_{SERIAL}_1", f"{SERIAL}_1"])  # fmt: skip
def test_the_long_forms_of_a_serial_are_the_same_serial(serial: str) -> None:
    assert plain_serial(serial) == SERIAL


def test_a_serial_that_only_begins_alike_is_another() -> None:
    assert choose((disk("/dev/nvme1n1", f"{SERIAL}0"), disk("/dev/nvme2n1", SERIAL[:-1])), {}, VOLUME) is None


def test_a_link_helps_where_the_disk_shows_no_serial() -> None:
    seen = (disk("/dev/nvme1n1"), disk("/dev/nvme2n1"))
    assert choose(seen, {LINK_PREFIX + SERIAL: "/dev/nvme2n1"}, VOLUME) == disk("/dev/nvme2n1")
    assert choose(seen, {f"{LINK_PREFIX}{SERIAL}_1": "/dev/nvme2n1"}, VOLUME) == disk("/dev/nvme2n1")


def test_a_link_to_a_disk_of_another_serial_is_old() -> None:
    seen = (disk("/dev/nvme1n1", "AWS6AF4B6C2CC20D3A1F"), disk("/dev/nvme2n1", SERIAL))
    assert choose(seen, {LINK_PREFIX + SERIAL: "/dev/nvme1n1"}, VOLUME) == disk("/dev/nvme2n1", SERIAL)
    assert choose(seen[:1], {LINK_PREFIX + SERIAL: "/dev/nvme1n1"}, VOLUME) is None


def test_a_link_to_a_partition_is_no_disk() -> None:
    assert choose((disk("/dev/nvme1n1"),), {f"{LINK_PREFIX}{SERIAL}-part1": "/dev/nvme1n1"}, VOLUME) is None


def test_two_disks_that_claim_to_be_the_volume_are_refused() -> None:
    with pytest.raises(Retryable, match="/dev/nvme1n1, /dev/nvme2n1 all claim"):
        choose((disk("/dev/nvme2n1", SERIAL), disk("/dev/nvme1n1", SERIAL)), {}, VOLUME)


@pytest.mark.parametrize("volume", ["", "vol-", "vol-xyz", "0123456789abcdef0", "vol-0123/../sd", f"{VOLUME}\n"])
def test_what_is_no_volume_id_is_refused(volume: str) -> None:
    with pytest.raises(Fatal, match="no volume id"):
        serial_of(volume)


@pytest.mark.parametrize("given, found", [("/dev/sdf", "/dev/xvdf"), ("/dev/xvdf", "/dev/xvdf"), ("/dev/sdg", None),
                                          ("", None), ("sdf", None), ("/dev/sdf1", None), ("/dev", None)])  # fmt: skip
def test_on_xen_the_name_given_at_attach_counts(given: str, found: str | None) -> None:
    """A p3.2xlarge: the root volume and ours; an i3 beside it has NVMe instance-store disks."""
    seen = (disk("/dev/xvda", children=True), disk("/dev/xvdf"), disk("/dev/nvme0n1", "AWS6AF4B6C2CC20D3A1F"))
    chosen = choose(seen, {}, VOLUME, given)
    assert (chosen and chosen.path) == found


def test_on_nitro_the_name_given_at_attach_means_nothing() -> None:
    root, nameless = disk("/dev/nvme0n1", "vol0aaaaaaaaaaaaaaaa"), disk("/dev/nvme0n1")
    assert choose((root, disk("/dev/xvdf")), {}, VOLUME, "/dev/sdf") is None
    assert choose((nameless, disk("/dev/xvdf")), {}, VOLUME, "/dev/sdf") is None


# ------------------------------------------------------------------------------------------- a thousand machines
@dataclass
class Layout:
    """A machine made up by chance: `truth` is the path of our volume's disk, None while it is not there."""

    rows: list[dict[str, object]] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    attached_as: str = ""
    truth: str | None = None
    certain: bool = True  # whether the machine shows enough to find it


def nitro(rng: random.Random) -> Layout:
    layout = Layout(attached_as=rng.choice(["", "/dev/sdf", "/dev/sdp"]))
    kinds = ["root"] + ["store"] * rng.randrange(9) + ["other"] * rng.randrange(5)
    kinds += ["ours"] if rng.random() < 0.8 else []
    rng.shuffle(kinds)  # the order of discovery
    for number, kind in enumerate(kinds):
        path = f"/dev/nvme{number}n1"
        store, other = f"AWS{rng.randrange(16**17):017X}", f"vol0{rng.randrange(16**16):016x}"
        serial: str | None = store if kind == "store" else other
        if kind == "ours":
            layout.truth, serial = path, SERIAL
        if rng.random() < 0.7 and kind != "store":
            layout.links[LINK_PREFIX + str(serial) + rng.choice(["", "_1"])] = path
        if rng.random() < 0.1:  # udev has not spoken yet
            layout.certain = layout.certain and kind != "ours"
            serial = None
        layout.rows.append(row(rng, path, serial))
    if rng.random() < 0.2:  # a link left from a disk that is gone, to a number that another disk has now
        gone = f"/dev/nvme{rng.randrange(len(kinds))}n1"
        seen = next(each for each in layout.rows if each["path"] == gone)
        if seen["serial"]:
            layout.links.setdefault(LINK_PREFIX + SERIAL, gone)
    return layout


def xen(rng: random.Random) -> Layout:
    letters = rng.sample("bcdefghijklmnop", rng.randrange(1, 8))
    layout = Layout([row(rng, "/dev/xvda", None)] + [row(rng, f"/dev/xvd{letter}", None) for letter in letters[1:]])
    layout.attached_as = f"/dev/{rng.choice(['sd', 'xvd'])}{letters[0]}"
    if rng.random() < 0.8:
        layout.truth = f"/dev/xvd{letters[0]}"
        layout.rows.append(row(rng, layout.truth, None))
    for number in range(rng.randrange(3)):
        layout.rows.append(row(rng, f"/dev/nvme{number}n1", f"AWS{rng.randrange(16**17):017X}"))
    rng.shuffle(layout.rows)
    return layout


def row(rng: random.Random, path: str, serial: str | None) -> dict[str, object]:
    size: object = rng.choice([8, 100, 125, 900]) * GIB
    known: dict[str, object] = {"name": path[5:], "path": path, "serial": serial, "size": rng.choice([size, str(size)])}
    known |= {"mountpoint": None} if rng.random() < 0.3 else {"mountpoints": [None]}
    if serial and serial.startswith("vol") and rng.random() < 0.2:
        known["serial"] = f"Amazon Elastic Block Store_{serial}"
    return known | ({"children": [{"name": f"{path[5:]}p1"}]} if rng.random() < 0.2 else {})


def test_in_a_thousand_layouts_no_wrong_disk_is_chosen() -> None:
    found = 0
    for seed in range(1000):
        rng = random.Random(seed)
        layout = xen(rng) if rng.random() < 0.2 else nitro(rng)
        seen = parse_lsblk(json.dumps({"blockdevices": layout.rows}))
        chosen = choose(seen, layout.links, VOLUME, layout.attached_as)
        path = None if chosen is None else chosen.path
        assert path in (None, layout.truth), f"seed {seed}: {path} instead of {layout.truth}: {layout}"
        if layout.certain:
            assert path == layout.truth, f"seed {seed}: not found: {layout}"
        found += path is not None
    assert found > 600
