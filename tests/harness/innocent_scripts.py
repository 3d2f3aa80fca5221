"""The scripts of tests/innocents, with the command of each; `STEPS` and `SECONDS` are filled in."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "innocents"
_COMMANDS = {
    "shell_wrapper": ["sh", "-c", "./shell_wrapper.sh STEPS SECONDS"],
    "host_folders": ["python", "host_folders.py", "STEPS", "SECONDS", "--lr", "0.05"],
}
WITHOUT_TORCH = (
    "epoch_files", "best_only", "says_nothing", "csv_rows", "hub_folders", "logger_versions", "keras_files",
    "shell_wrapper", "host_folders", "contract", "copies_best",
)  # fmt: skip
INNOCENT = ("plain_loop", *WITHOUT_TORCH)
GUILTY = {
    "guilty_never_loads": "began from nothing: its trainer wrote working-copy/checkpoint.pth.tar again",
    "guilty_new_folder": "model.pt into a new folder and had read no file",
    "guilty_copies_best": "began from nothing: its trainer wrote working-copy/",
    "guilty_saves_at_end": "had saved nothing when it went",
    "guilty_home": "home/saves/last.pt: written on",
}


def command(name: str, steps: int, seconds: float) -> list[str]:
    words = _COMMANDS.get(name, ["python", f"{name}.py", "STEPS", "SECONDS"])
    return [word.replace("STEPS", str(steps)).replace("SECONDS", str(seconds)) for word in words]


def files(name: str) -> dict[str, str]:
    """The repository of a script: its own files alone."""
    names = ["shell_wrapper.sh", "shell_worker.py"] if name == "shell_wrapper" else [f"{name}.py"]
    return {file: (FOLDER / file).read_text(encoding="utf-8") for file in names}
