"""Writes its checkpoint into the working directory, as five of seven public repositories did."""

import pathlib

folder = pathlib.Path("runs")
folder.mkdir(exist_ok=True)
before = (folder / "model.bin").exists()
(folder / "model.bin").write_bytes(b"w" * 5000)
print("resumed" if before else "fresh")
