"""What reaches a terminal, and what comes from one: nothing acts on it, nothing is lost."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from cpsbs import __main__ as entry
from cpsbs.cli import draws, inputs, tables, terminal
from cpsbs.cli.commands import app
from tests.models.folders import causal_folder

HOSTILE = "dog\x1b[2J\x1b]0;owned\x07\x9b31m\x7f\u202egod [red]cat[/red] :dog:"
SHOWN = r"dog\x1b[2J\x1b]0;owned\x07\x9b31m\x7f\u202egod [red]cat[/red] :dog:"
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
STYLE = re.compile(r"\x1b\[[0-9;]*m")
RECORD: dict[str, Any] = {
    "text": "A man rides a bicycle.",
    "texts": ["Un homme fait du vélo.", "Un homme monte à bicyclette."],
    "log_prob": [-1.0, -2.0],
    "log_inclusion": [-0.1, -0.2],
    "finished": [True, True],
    "bleu": [0.5, 0.25],
}


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal_folder(tmp_path_factory.mktemp("causal"))


class Screen(NamedTuple):
    """What a person sees of a command."""

    status: int
    out: str
    err: str


class Terminal:
    """A pseudo-terminal of our own process, and what has been written to it."""

    def __init__(self, encoding: str) -> None:
        self._ours, theirs = pty.openpty()
        settings = termios.tcgetattr(theirs)
        settings[1] &= ~termios.OPOST  # newlines stay newlines
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        self.stream = open(theirs, "w", encoding=encoding)  # noqa: SIM115
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._ours, 65536):
                self._shown += data
        except OSError:
            pass  # the other end has closed

    def shown(self) -> str:
        encoding = self.stream.encoding
        self.stream.close()
        self._reader.join()
        os.close(self._ours)
        return STYLE.sub("", self._shown.decode(encoding))


Run = Callable[..., Screen]


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process, with standard output and error on terminals."""

    def run(
        *arguments: str | Path,
        encoding: str = "utf-8",
        columns: str = "80",
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> Screen:
        terminals = Terminal(encoding), Terminal(encoding)
        monkeypatch.setattr(sys, "stdout", out or terminals[0].stream)
        monkeypatch.setattr(sys, "stderr", err or terminals[1].stream)
        monkeypatch.setattr(sys, "argv", ["cpsbs", *map(str, arguments)])
        for name, value in {"COLUMNS": columns, "TERM": "xterm", "TERMINAL_WIDTH": ""}.items():
            monkeypatch.setenv(name, value)
        try:
            entry.main()
        except SystemExit as end:
            status = end.code
        finally:
            monkeypatch.undo()
            shown = [terminal.shown() for terminal in terminals]
        for stream in (out, err):
            if stream is not None:
                stream.close()
        assert isinstance(status, int)
        return Screen(status, *shown)

    return run


def run(*arguments: str | Path, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def one_line(result: Result, status: int = 1) -> str:
    """The error, which is a line and all there is."""
    assert result.exit_code == status, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert not result.stdout
    return result.stderr


def loads_nothing(*_: object) -> None:
    raise AssertionError("a model is loaded")


# Escape sequences


def test_no_character_of_a_text_acts_on_the_terminal(at_terminal: Run, causal: Path) -> None:
    sample = at_terminal("sample", HOSTILE, "-m", causal, "-k", "2", "--max-length", "4")
    compare = at_terminal("compare", HOSTILE, "-m", causal, "-k", "2", "--max-length", "4")
    for screen in (sample, compare):
        assert screen.status == 0, screen.err
        assert SHOWN in " ".join(screen.out.split())
        assert not CONTROLS.search(screen.out)


def test_generated_texts_and_names_of_models_do_not_act_on_it_either() -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(tables.beam_table({**RECORD, "text": HOSTILE, "texts": [HOSTILE, HOSTILE]}))
    assert captured.get().count(SHOWN) == 3
    assert not CONTROLS.search(captured.get())


def test_a_model_with_an_escape_sequence_in_its_name_is_told_without_it(
    at_terminal: Run, causal: Path, tmp_path: Path
) -> None:
    (tmp_path / "\x1b[2J").symlink_to(causal)
    few = ["-k", "2", "--max-length", "3"]
    screen = at_terminal("estimate", "length", "the dog", "-m", tmp_path / "\x1b[2J", *few)
    assert screen.status == 0, screen.err
    assert r"\x1b[2J" in screen.out
    assert not CONTROLS.search(screen.out)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["sample", "a", "--file", HOSTILE], 1),
        (["sample", "--file", HOSTILE], 1),
        (["sample", "a", "--design", HOSTILE], 1),
        (["sample", "a", "-m", HOSTILE], 1),
        (["sample", "a", f"--{HOSTILE}"], 2),
        (["sample", "a", "-k", HOSTILE], 2),
        (["estimate", HOSTILE], 2),
        ([HOSTILE], 2),
    ],
)
def test_an_error_quotes_a_value_in_a_line_that_does_not_act(
    at_terminal: Run, arguments: list[str], status: int
) -> None:
    screen = at_terminal(*arguments)
    assert screen.status == status
    assert screen.err.startswith("error: ")
    assert screen.err.count("\n") == 1
    assert not CONTROLS.search(screen.err)
    assert not screen.out


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_json_on_a_terminal_has_the_exact_values_and_none_that_act(
    at_terminal: Run, causal: Path, encoding: str
) -> None:
    text = HOSTILE + "é→😀"
    few = ["-k", "2", "--max-length", "3", "--json"]
    screen = at_terminal("sample", text, "-m", causal, *few, encoding=encoding)
    assert screen.status == 0, screen.err
    assert not CONTROLS.search(screen.out)
    assert json.loads(screen.out)["text"] == text
    assert ("é" in screen.out) == (encoding == "utf-8")


# Narrow terminals


@pytest.mark.parametrize("columns", [20, 24, 30, 46, 80])
def test_a_table_shows_every_text_and_number_however_narrow_it_is(columns: int) -> None:
    console = Console(width=columns)
    with console.capture() as captured:
        console.print(tables.beam_table(RECORD))
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= columns
    for word in " ".join(["0.3679", "0.9048", "50.0", *RECORD["texts"]]).split():
        assert word in shown


@pytest.mark.parametrize("columns", ["0", "1", "7", "24", "abc", "-5", "²", "9" * 5000])
def test_a_size_that_no_terminal_has_hides_nothing(
    at_terminal: Run, causal: Path, columns: str
) -> None:
    few = ["-k", "2", "--max-length", "3"]
    screen = at_terminal("sample", "the dog", "-m", causal, *few, columns=columns)
    assert screen.status == 0, screen.err
    shown = " ".join(screen.out.split())
    assert "the dog" in shown
    assert "…" not in shown.replace("… (unfinished)", "")
    assert len(re.findall(r"\d\.\d{4}|\de-\d\d", shown)) == 4


def test_rows_of_a_table_become_lines_with_the_names_of_the_numbers(at_terminal: Run) -> None:
    narrow = at_terminal("designs", columns="24")
    assert narrow.status == 0
    assert "design conditional-poisson" in " ".join(narrow.out.split())
    assert "the paper's CPSBS" in " ".join(narrow.out.split())
    wide = at_terminal("designs", columns="120")
    assert "design conditional-poisson" not in " ".join(wide.out.split())


# Terminals of other encodings


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_shows_escapes_and_boxes_of_ascii(
    at_terminal: Run, encoding: str
) -> None:
    screen = at_terminal("sample", "The tea is hot → 茶", "-k", "2", encoding=encoding)
    assert screen.status == 0, screen.err
    assert r"The tea is hot \u2192 \u8336" in screen.out
    assert ("é" in screen.out) == (encoding == "latin-1")
    assert "----" in screen.out


@pytest.mark.parametrize("arguments", [["-h"], ["sample", "-h"], ["designs"], ["models"]])
def test_help_and_lists_are_shown_on_an_ascii_terminal(
    at_terminal: Run, arguments: list[str]
) -> None:
    screen = at_terminal(*arguments, encoding="ascii")
    assert screen.status == 0, screen.err
    assert len(screen.out.splitlines()) > 3


def test_errors_are_shown_on_an_ascii_terminal(at_terminal: Run) -> None:
    screen = at_terminal("sample", "--file", "café", encoding="ascii")
    assert (screen.status, screen.out) == (1, "")
    assert r"caf\xe9" in screen.err


# Numbers


@pytest.mark.parametrize("option", ["-k", "--max-length", "--batch-size", "--runs", "--repeats"])
@pytest.mark.parametrize("value", ["1" + "0" * 29, "9" * 400, "9" * 5000, "1000001"])
def test_a_count_beyond_all_bounds_is_refused_by_name(option: str, value: str) -> None:
    error = one_line(run("estimate", "length", "Yes.", option, value), status=2)
    assert option in error
    assert "1000000" in error or "integer" in error  # of which Python reads 4,300 digits


def test_a_seed_has_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "load", loads_nothing)
    assert "seed is 999" in one_line(run("sample", "Yes.", "--seed", "9" * 400))
    assert "--rows" in one_line(run("compare", "Yes.", "--rows", "9" * 40), status=2)


@pytest.mark.parametrize("command", ["sample", "compare"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize("option", ["temperature", "nucleus"])
def test_a_number_that_is_not_finite_is_refused_by_name_before_a_model_is_loaded(
    command: str, option: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "load", loads_nothing)
    assert f"{option} is " in one_line(run(command, "Yes.", f"--{option}", value))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_annealing_is_finite(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "load", loads_nothing)
    assert f"anneal is {value}" in one_line(
        run("sample", "Yes.", "--design", "conditional-poisson", "--anneal", value)
    )


# Bytes that are no text

BYTES = "caf\udce9"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["sample", "Yes.", BYTES], "text 2"),
        (["compare", BYTES], "the text"),
        (["compare", "Yes.", "-r", BYTES], "--reference"),
        (["sample", "Yes.", "-r", BYTES], "reference 1"),
        (["sample", "Yes.", "-m", BYTES], "--model"),
        (["sample", "Yes.", "--design", BYTES], "--design"),
        (["sample", "--file", BYTES], "--file"),
        (["sample", "Yes.", "--reference-file", BYTES], "--reference-file"),
    ],
)
def test_an_argument_that_is_not_utf8_is_refused_by_name(
    arguments: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "load", loads_nothing)
    error = one_line(run(*arguments))
    assert error.startswith(f"error: {name} is ")
    assert r"caf\udce9" in error


def test_a_file_whose_name_is_not_utf8_is_read(tmp_path: Path) -> None:
    (tmp_path / BYTES).write_text("one\n")
    assert list(inputs.read_lines(tmp_path / BYTES, "--file")) == ["one"]


# Files


@pytest.mark.parametrize("option", ["--file", "--reference-file"])
@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("/dev/zero", "line 1 of /dev/zero has more than 1,048,576 bytes"),
        ("/dev/urandom", "not UTF-8"),
        ("/proc/self/mem", "Input/output error"),
        (".", "Is a directory"),
        ("missing", "No such file or directory"),
        ("README.md/x", "Not a directory"),
        ("x" * 5000, "File name too long"),
    ],
)
def test_what_is_not_a_file_of_texts_is_refused(option: str, file: str, reason: str) -> None:
    texts = ["Yes."] if option == "--reference-file" else []
    assert reason in one_line(run("sample", *texts, option, file))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(mode=0)
    assert "Permission denied" in one_line(run("sample", "--file", tmp_path / "secret"))


def test_an_empty_file_has_no_texts(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert "is empty" in one_line(run("sample", "--file", tmp_path / "empty"))


def test_lines_are_read_up_to_their_limit(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_bytes(b"\xef\xbb\xbfa\r\n\n" + b"b" * inputs.LONGEST_LINE + b"\nc")
    lines = list(inputs.read_lines(file, "--file"))
    assert lines == ["a", "", "b" * inputs.LONGEST_LINE, "c"]
    file.write_bytes(b"a\n" + b"b" * (inputs.LONGEST_LINE + 1) + b"\nc")
    with pytest.raises(ValueError, match="has more than 1,048,576 bytes"):
        list(inputs.read_lines(file, "--file"))


def test_a_byte_that_is_not_utf8_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    for data, line in ((b"\xef\xbb\xbfa\xff\n", 1), (b"a\nb\xff\n", 2)):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=f"line {line} has the byte 0xff"):
            list(inputs.read_lines(file, "--file"))


# Standard streams


@pytest.mark.parametrize("command", ["designs", "--help", "--version"])
def test_output_that_cannot_be_written_is_one_line_of_error(command: str, at_terminal: Run) -> None:
    screen = at_terminal(command, out=open("/dev/full", "w"))  # noqa: SIM115
    assert screen.status == 1
    assert screen.err.startswith("error: ")
    assert "No space left on device" in screen.err
    assert screen.err.count("\n") == 1


@pytest.mark.parametrize("command", ["designs", "--help"])
def test_a_pipe_that_nobody_reads_is_no_error(command: str, at_terminal: Run) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    screen = at_terminal(command, out=open(theirs, "w"))  # noqa: SIM115
    assert (screen.status, screen.err) == (0, "")


def test_an_error_that_cannot_be_written_leaves_its_status(at_terminal: Run) -> None:
    screen = at_terminal("sample", "--file", "missing", err=open("/dev/full", "w"))  # noqa: SIM115
    assert (screen.status, screen.out) == (1, "")


def test_output_that_was_closed_is_an_error_and_no_other_file_takes_its_place() -> None:
    """In processes of their own."""
    shell = ["bash", "-c", f"{sys.executable} -m cpsbs designs >&- <&-"]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: standard output is closed; ")
    assert done.stderr.count("\n") == 1
    code = "import os; from cpsbs import __main__ as entry; entry._open_standard_streams()\n"
    code += "os._exit(os.open('/dev/null', os.O_RDONLY))"
    shell = ["bash", "-c", f'{sys.executable} -c "{code}" >&- <&- 2>&-']
    assert subprocess.run(shell).returncode == 3


# Ctrl-C


@pytest.mark.parametrize(
    ("start", "package"), [("cpsbs", "torch"), ("-m", "torch"), ("cpsbs", "transformers")]
)
def test_ctrl_c_while_packages_are_imported_ends_without_a_traceback(
    start: str, package: str
) -> None:
    code = "import os, signal, sys\n"
    # Shells make what they start in the background ignore the signal, and these tests with it.
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "class Finder:\n"
    code += "    def find_spec(self, name, *_):\n"
    code += f"        if name == {package!r}: os.kill(os.getpid(), signal.SIGINT)\n"
    code += "sys.meta_path.insert(0, Finder())\n"
    code += f"sys.argv = [{start!r}, 'sample', 'Yes.']\n"
    code += f"sys.orig_argv = ['python', {start!r}, 'cpsbs']\n"
    code += "from cpsbs.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert not done.stdout
    # Before a command has begun there is nothing to tell.
    assert done.stderr.startswith("stopped") == (package == "transformers")
    assert done.stderr.count("\n") == (package == "transformers")


def test_a_line_of_json_keeps_its_value() -> None:
    record = {"text": HOSTILE + "é\u2028\ud800"}
    line = json.dumps(record, ensure_ascii=False) + "\n"
    assert json.loads(terminal.visible_json(line)) == record
    assert not CONTROLS.search(terminal.visible_json(line))
    assert "é" in terminal.visible_json(line)
