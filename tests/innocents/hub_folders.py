"""As Hugging Face's Trainer: out/checkpoint-N/ folders, the last two kept, resumes from the newest whole one."""

import json
import shutil
import struct
import sys
import time
from pathlib import Path

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
out = Path("out")


def number(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def safetensors(value: int) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [2048], "data_offsets": [0, 2048]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes([value % 256]) * 2048


saves = sorted((save for save in out.glob("checkpoint-*") if (save / "trainer_state.json").exists()), key=number)
first = json.loads((saves[-1] / "trainer_state.json").read_text())["global_step"] if saves else 0
for step in range(first + 1, steps + 1):
    time.sleep(seconds)
    print(json.dumps({"loss": 1 / step, "step": step}), flush=True)
    if step % 3 == 0 or step == steps:
        folder = out / f"checkpoint-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(safetensors(step))
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        for old in sorted(out.glob("checkpoint-*"), key=number)[:-2]:
            shutil.rmtree(old)
