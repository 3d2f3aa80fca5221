"""How the program ends where its surroundings end first: a reader that has gone, Ctrl-C while it is still loading."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer

from spotheal.fleet.terminal.console import verb


def test_the_help_says_nothing_of_a_reader_that_has_gone() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-c", "from spotheal.fleet.cli import main; import sys; sys.argv = ['fleetctl']; main()"],
        stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_ctrl_c_while_the_program_loads_is_no_traceback() -> None:
    loading = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "sys.argv = ['fleetctl', 'status']\n"
        "from spotheal.fleet.cli import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", loading], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fleetctl: interrupted\n")


def test_a_ctrl_c_in_a_request_of_a_new_run_does_not_advise_a_second_new_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def request(new_run: bool) -> None:
        raise KeyboardInterrupt

    for new_run, advice in ((True, "without --new-run goes on with it"), (False, "the same command goes on")):
        with pytest.raises(typer.Exit) as ended:
            verb(request)(new_run=new_run)
        assert ended.value.exit_code == 130
        assert advice in capsys.readouterr().err


def test_a_closed_standard_output_is_no_error() -> None:
    program = "import sys; sys.argv = ['fleetctl', *sys.argv[1:]]; from spotheal.fleet.cli import main; main()"
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" iam show operator >&-', sys.executable, program],
        stderr=subprocess.PIPE, text=True, timeout=60,
        env={**os.environ, "AWS_REGION": "us-west-2", "AWS_EC2_METADATA_DISABLED": "true"},
    )  # fmt: skip
    assert done.returncode == 0 and "unexpected" not in done.stderr


@pytest.mark.parametrize(("name", "code"), [("request", 1), ("logs", 0)])
def test_a_reader_that_goes_hides_no_unfinished_work(name: str, code: int) -> None:
    program = (
        "import sys\n"
        "from spotheal.fleet.terminal.console import verb\n"
        f"def {name}():\n"
        "    for number in range(100000):\n"
        "        print('the plan', file=sys.stderr, flush=True)\n"
        "    print('the run')\n"
        f"import typer; app = typer.Typer(); app.command()(verb({name})); app()\n"
    )
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-c", program], stdout=writes, stderr=writes, timeout=60)
    os.close(writes)
    assert done.returncode == code
