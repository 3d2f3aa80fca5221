"""As Keras: a .keras archive at the end of each epoch, whose name has epoch and loss."""

import re
import sys
import time
import zipfile
from pathlib import Path

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
folder = Path("models")
folder.mkdir(exist_ok=True)
found = {int(re.match(r"(\d+)", path.name)[1]): path for path in folder.glob("*.keras")}
first = max(found, default=0)
if found:
    with zipfile.ZipFile(found[first]) as archive:
        assert archive.read("metadata.json") == b"{}"
for epoch in range(first + 1, steps + 1):
    time.sleep(seconds)
    path = folder / f"{epoch:02d}-{1 / epoch:.2f}.keras"
    with zipfile.ZipFile(folder / "writing.tmp", "w") as archive:
        archive.writestr(zipfile.ZipInfo("metadata.json"), "{}")
        archive.writestr(zipfile.ZipInfo("model.weights.h5"), b"\x89HDF\r\n\x1a\n" + bytes([epoch % 256]) * 2048)
    (folder / "writing.tmp").replace(path)
    print(f"Epoch {epoch}/{steps}\n100/100 - loss: {1 / epoch:.4f}", flush=True)
