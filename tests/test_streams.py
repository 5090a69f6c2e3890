"""What a program prints when nobody reads it: it goes on, and its files are not what it prints to."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from jax_fp8.streams import Stream, Streams, one_line, surviving

pytestmark = pytest.mark.versions
ROOT = Path(__file__).parents[1]
PROGRAM = """
import importlib.util, os, sys
found = importlib.util.spec_from_file_location("streams", sys.argv[1])
streams = importlib.util.module_from_spec(found)
found.loader.exec_module(streams)

def main():
    with streams.surviving() as both:
        file = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
        for number in range(20_000):
            print("line", number, "gr\\u00fcn")
            print("error", number, file=sys.stderr)
        for stream in (1, 2):
            try:
                os.write(stream, b"of a library")
            except OSError:
                pass
        os.write(file, b"whole")
        return both.status(0)

sys.exit(main() if sys.argv[3] == "ours" else print("line\\n" * 20_000))
"""


def run(tmp_path, shell, whose="ours"):
    """The exit status of a program in a shell, what it printed, and what its file has."""
    (tmp_path / "program.py").write_text(PROGRAM)
    file = tmp_path / "file"
    file.unlink(missing_ok=True)
    command = f"{sys.executable} {tmp_path / 'program.py'} {ROOT / 'jax_fp8/streams.py'} {file} {whose}"
    script = f"set -o pipefail; {shell.format(command)}"
    finished = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    return finished.returncode, finished.stdout, finished.stderr, file.read_text() if file.exists() else ""


@pytest.mark.parametrize("shell", ["{} 2>/dev/null | head -1", "{} 2>&1 | head -1"])
def test_a_reader_that_has_gone_ends_nothing(shell, tmp_path):
    status, output, errors, file = run(tmp_path, shell)
    assert (status, errors, file) == (0, "", "whole") and len(output.splitlines()) == 1
    assert run(tmp_path, shell, "plain")[0] != 0  # negative control


@pytest.mark.parametrize("shell", ["{} >&- 2>&-", "{} <&- >&- 2>&-", "{} 2>&- >/dev/null", "{} >&- 2>/dev/null"])
def test_without_streams_a_file_gets_a_number_of_its_own(shell, tmp_path):
    """Or what a library prints would stand in it."""
    assert run(tmp_path, shell) == (0, "", "", "whole")


def test_a_full_disk_is_said_once_and_ends_with_status_1(tmp_path):
    status, output, errors, file = run(tmp_path, "{} >/dev/full")
    assert (status, output, file) == (1, "", "whole")
    said = errors.replace("of a library", "").splitlines()
    assert [line for line in said if not line.startswith("error")] == [
        "the rest of what was printed is lost: No space left on device"
    ]


def test_characters_that_a_stream_cannot_show_are_escapes():
    for encoding, shown in (("ascii", r"gr\xfcn \udcff"), ("utf-8", r"grün \udcff")):
        content = io.BytesIO()
        stream = Stream(io.TextIOWrapper(content, encoding, "strict"))
        print("grün \udcff", file=stream, flush=True)  # type: ignore[arg-type]
        assert content.getvalue().decode(encoding) == shown + "\n"


class Failing(io.StringIO):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"), [(BrokenPipeError(), 0), (OSError(28, "No space left on device"), 1)], ids=["gone", "full"]
)
def test_a_stream_without_a_number(error, status):
    output, errors = Stream(Failing(error)), Stream(io.StringIO())
    output.writelines(["a", "b"])
    assert output.write("abc") == 3
    assert (Streams(output, errors).status(0), Streams(output, errors).status(3)) == (status, 3)
    with surviving() as streams:
        assert isinstance(sys.stdout, Stream) and sys.stdout.encoding
        assert streams.status(2) == 2
    assert not isinstance(sys.stdout, Stream)


def test_a_message_is_one_line():
    assert one_line(ValueError("two\n  lines\r")) == "two lines"
    assert one_line("a\x1b[31m \udcff grün") == r"a\x1b[31m \udcff grün"
