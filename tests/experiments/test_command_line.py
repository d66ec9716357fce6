"""Which end of a command has which exit code, and what is printed of it."""

import errno
import io
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from jax.errors import JaxRuntimeError

from experiments import chat, evaluate, export, grpo, plot
from experiments.command_line import GPU_MEMORY, run_command
from experiments.config import CheckpointConfig, Config
from experiments.options import flat_fields, option_name
from experiments.processes import Processes
from experiments.runs.console import RunConsole
from experiments.runs.ends import AlreadyFinished, GuardAbort, Interrupted
from experiments.runs.signals import caught_signals
from tests.experiments.tiny_directory import write_tiny_directory

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Options:
    """Two options, one in a section."""

    name: str = "a"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


def wrapped(outer, inner):
    outer.__cause__ = inner
    return outer


FULL = OSError(errno.ENOSPC, "No space left on device", "/runs/a")
BUG = "(a bug; run again with --debug for the traceback)"
GONE = ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
NO_SPACE = ValueError("RESOURCE_EXHAUSTED: writing [OS error 28: ENOSPC No space]")
ENDS = {
    "bad input": (ValueError("a file:\n  expected this"), 2, "error: a file: expected this"),
    "a word that is an option too": (ValueError("name"), 2, "error: name"),
    "an option": (ValueError("name: expected b, got a"), 2, "error: --name: expected b, got a"),
    "an option of a section": (ValueError("every_minutes: no"), 2, "error: --checkpoint.every-minutes: no"),
    "its whole name": (ValueError("checkpoint.every_minutes: no"), 2, "error: --checkpoint.every-minutes: no"),
    "a file that cannot be read": (wrapped(ValueError("x: expected a file"), FULL), 2, "error: x: expected a file"),
    "a full disk": (FULL, 3, "error: /runs/a: No space left on device"),
    "no permission": (PermissionError(errno.EACCES, "Permission denied"), 3, "error: Permission denied"),
    "a read-only disk, wrapped": (wrapped(RuntimeError("saving failed"), FULL), 3, "error: saving failed"),
    "a full disk in a text": (NO_SPACE, 3, f"error: {NO_SPACE}"),
    "a process that has gone": (GONE, 3, f"error: {GONE}"),
    "no memory": (MemoryError(), 3, "error: MemoryError"),
    "no memory of a device": (JaxRuntimeError("RESOURCE_EXHAUSTED: Out"), 3, "error: RESOURCE_EXHAUSTED: Out"),
    "a guard": (GuardAbort("five steps in a row"), 4, "error: five steps in a row"),
    "SIGTERM": (Interrupted(signal.SIGTERM, "step 3 is saved"), 143, "error: step 3 is saved"),
    "SIGINT": (Interrupted(signal.SIGINT, "step 3 is saved"), 130, "error: step 3 is saved"),
    "Ctrl-C": (KeyboardInterrupt(), 130, "error: interrupted"),
    "a bug": (KeyError("x"), 1, f"error: KeyError: 'x' {BUG}"),
    "a bug of JAX": (JaxRuntimeError("INTERNAL: x"), 1, f"error: JaxRuntimeError: INTERNAL: x {BUG}"),
}


def end(error, *arguments):
    """The exit code of a command that raises."""

    def main(options):
        raise error

    with pytest.raises(SystemExit) as stopped:
        run_command(Options, main, program="x", description="y", arguments=arguments)
    assert type(stopped.value.code) is int
    return stopped.value.code


@pytest.mark.parametrize("name", ENDS)
def test_one_line_and_its_exit_code(name, capsys):
    error, code, line = ENDS[name]
    assert end(error) == code
    assert capsys.readouterr() == ("", line + "\n")


FROM_ELSEWHERE = ("a process that has gone", "a bug of JAX")


@pytest.mark.parametrize("name", ["a bug", "a full disk", "no memory of a device", *FROM_ELSEWHERE])
def test_what_may_come_from_another_process_is_not_told_as_this_ones_fault(name, capsys, monkeypatch):
    told = []
    monkeypatch.setattr(Processes, "end", lambda here, code, sentence, *, is_origin: told.append(is_origin))
    end(ENDS[name][0])
    assert told == [name not in FROM_ELSEWHERE]


EVIL = "a\x1b]0;owned\x07\rb\x9b2J\u202e"


@pytest.mark.bad_input
@pytest.mark.parametrize("error", [ValueError(f"x: {EVIL}"), KeyError(EVIL), OSError(2, "none", f"/{EVIL}\n")])
@pytest.mark.parametrize("arguments", [(), ("--debug",), (f"--{EVIL}",)])
def test_what_an_error_echoes_reaches_the_terminal_without_control_characters(error, arguments, capsys):
    end(error, *arguments)
    printed = capsys.readouterr().err
    assert "owned" in printed and all(character.isprintable() for character in printed if character != "\n")
    assert "--debug" in arguments or printed.count("\n") == 1


def test_the_screen_of_a_run_shows_control_characters_as_escapes():
    console = RunConsole(stream=(stream := io.StringIO()))
    console.say(EVIL)
    console.warn(EVIL)
    console.summary({"task": EVIL}, Path(EVIL), {})
    lines = stream.getvalue().splitlines()
    assert sum(r"a\x1b]0;owned\x07\rb\x9b2J\u202e" in line for line in lines) == 4
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("name", ["bad input", "a full disk", "a bug", "Ctrl-C"])
def test_debug_shows_the_traceback_of_every_end(name, capsys):
    error, code, line = ENDS[name]
    assert end(error, "--debug") == code
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "Traceback (most recent call last):" and printed[-1] == line


def started(arguments, folder):
    """A Python process with a folder of stand-ins for packages, which takes Ctrl-C as in a terminal."""
    # Whatever this process was started with.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        return subprocess.Popen([sys.executable, *arguments], env=environment, cwd=ROOT, **pipes)
    finally:
        signal.signal(signal.SIGINT, before)


SIGNALS = {signal.SIGINT: "error: interrupted\n", signal.SIGTERM: "error: ended by SIGTERM\n"}
# A signal that comes just before a sleep is answered after it.
WAIT = "print('begun', flush=True); [time.sleep(0.05) for _ in range(1200)]"


def check_end(process, number):
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    assert process.communicate(timeout=60) == ("", SIGNALS[number]) and process.returncode == 128 + number


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("command", ["grpo", "evaluate", "chat", "export", "plot"])
def test_a_signal_while_a_command_is_imported_is_one_line(command, number, tmp_path):
    """A package that takes a minute in the place of jax: nothing else is imported before it."""
    (tmp_path / "jax.py").write_text(f"import time; {WAIT}")
    check_end(started(["-m", f"experiments.{command}", "--no-such-option"], tmp_path), number)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("moment", [f"{WAIT}", f"atexit.register(lambda: exec({WAIT!r}, globals()))"])
def test_a_signal_in_a_command_and_after_its_last_line_is_one_line(moment, number, tmp_path):
    (tmp_path / "command.py").write_text(f"import atexit, time\ndef run_cli(): {moment}")
    check_end(started(["-c", "from experiments.entry import run_module; run_module('command')"], tmp_path), number)


def test_a_failure_of_jax_after_a_signal_is_the_interruption():
    """SIGTERM to a group of processes ends the assembler that XLA has started, too."""
    reason = "INTERNAL: ptxas exited with non-zero error code 15"
    failure = JaxRuntimeError(reason)
    with pytest.raises(Interrupted) as stopped, caught_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        raise failure
    assert str(stopped.value).startswith(f"SIGTERM: the step in progress is lost ({reason}); --resume repeats")
    assert stopped.value.exit_code == 143
    with pytest.raises(JaxRuntimeError), caught_signals():
        raise failure


def test_nothing_is_imported_before_signals_end_a_command_in_one_line():
    """Modules that neither the interpreter nor runpy has loaded; a signal while one is read is a traceback."""
    show = "import runpy, sys; before = set(sys.modules); import experiments; print(*sorted(set(sys.modules) - before))"
    process = started(["-c", show], ROOT)
    assert process.communicate(timeout=60) == ("experiments\n", "")


@pytest.mark.bad_input
@pytest.mark.parametrize("package", ["flax", "tyro"])
def test_a_missing_extra_is_one_line(package, tmp_path):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('no', name='{package}.inner')")
    process = started(["-m", "experiments.grpo"], tmp_path)
    words = f'error: no package {package}.inner; install the trainer: pip install -e ".[experiments]"\n'
    assert process.communicate(timeout=60) == ("", words) and process.returncode == 3


@pytest.mark.bad_input
def test_a_variable_that_jax_refuses_on_import_is_one_line(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "many")
    process = started(["-m", "experiments.grpo"], ROOT)
    words = 'error: environment: Invalid value "many" for JAX flag jax_num_cpu_devices\n'
    assert process.communicate(timeout=60) == ("", words) and process.returncode == 3


@pytest.mark.costly
@pytest.mark.bad_input
def test_a_platform_that_is_not_here_is_one_line(tmp_path, monkeypatch):
    """In every command, one after the other in one process."""
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    # No GPU is looked for, whatever this machine has.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = str(write_tiny_directory(tmp_path / "model"))
    commands = {"grpo": [], "evaluate": ["--model", model], "chat": [model]}
    script = f"""
import importlib
for name, arguments in {commands}.items():
    try:
        importlib.import_module(f"experiments.{{name}}").run_cli(arguments)
    except SystemExit as end:
        assert end.code == 3, end
"""
    process = started(["-c", script], ROOT)
    out, lines = process.communicate(timeout=60)
    assert (out, process.returncode, lines.count("\n")) == ("", 0, len(commands)), lines
    for line in lines.splitlines():
        assert line.startswith("error: JAX_PLATFORMS: expected devices that are here, got cuda")


def test_nothing_to_do_is_no_error(capsys):
    assert end(AlreadyFinished("it has ended")) == 0
    assert capsys.readouterr() == ("it has ended\n", "")


def test_a_result_is_returned_and_the_defaults_may_follow_from_the_arguments():
    named = {"program": "x", "description": "y", "default": lambda given: Options(name=" ".join(given))}
    made = run_command(Options, lambda options: options, arguments=["--debug", "--checkpoint.keep", "7"], **named)
    assert made == Options("--checkpoint.keep 7", CheckpointConfig(keep=7))


def test_a_command_takes_most_of_a_gpu_unless_the_environment_says_how_much(monkeypatch):
    for given in ({}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}):
        for name in GPU_MEMORY:
            monkeypatch.delenv(name, raising=False)
        for name, share in given.items():
            monkeypatch.setenv(name, share)
        run_command(Options, lambda options: None, program="x", description="y", arguments=[])
        # JAX refuses both together.
        seen = {name: os.environ[name] for name in GPU_MEMORY if name in os.environ}
        assert seen == (given or {"XLA_CLIENT_MEM_FRACTION": "0.9"})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("command", ["run_command", "export", "plot"])
def test_an_output_that_cannot_be_written_is_a_fault_of_the_environment(command, monkeypatch, capsys):
    for module in (export, plot):
        monkeypatch.setattr(module, "main", lambda config: [ROOT])
    named = {"program": "x", "description": "y", "arguments": []}
    commands = {
        "run_command": lambda: run_command(Options, lambda options: print("done"), **named),
        "export": lambda: export.run_cli(["a", "b"]),
        "plot": lambda: plot.run_cli(["a"]),
    }
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 (closing it fails again)
    with pytest.raises(SystemExit) as stopped, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", full)
        patched.setattr("os.dup2", lambda new, old: None)
        commands[command]()
    with pytest.raises(OSError):
        full.close()
    assert stopped.value.code == 3 and capsys.readouterr().err == "error: No space left on device\n"


def test_help_lists_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as stopped:
        grpo.run_cli(["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").replace("|", " ").split())
    assert stopped.value.code == 0 and "--debug" in text
    for words in ("0 done", "2 an option, a file", "3 the environment", "4 a guard", "130, 143 ended", "1 a bug"):
        assert words in text


def help_of(command, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        command.run_cli(["--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [grpo, evaluate, chat, export, plot])
def test_help_fits_its_window_and_breaks_lines_after_sentences_alone(command, monkeypatch, capsys):
    narrow = help_of(command, 80, monkeypatch, capsys)
    assert max(map(len, narrow.splitlines())) <= 80
    # So wide that no line is wrapped: breaks are those of the docstrings.
    listed = help_of(command, 2000, monkeypatch, capsys).partition("usage:")[2].splitlines()[1:]
    texts = [re.split(" {2,}", line.strip("│| "))[-1] for line in listed if "--help" not in line and "  " in line]
    texts = [text for text in texts if re.search(r"[a-z] [a-z]", text) and not text.endswith(("options", "arguments"))]
    assert [text for text in texts if text[-1] not in ".:)"] == [] and texts


def test_help_spells_options_as_they_are_typed(monkeypatch, capsys):
    text = help_of(grpo, 2000, monkeypatch, capsys)
    known = flat_fields(Config)
    sections = "|".join({field.partition(".")[0].replace("_", "[_-]") for field in known if "." in field})
    assert re.findall(rf"(?<!--)\b(?:{sections})\.[a-z_-]+\b", text) == []
    last = {field.rpartition(".")[2] for field in known}
    python = "|".join(name for name in last if "_" in name)
    # No file of that name, such as docs/gradient_filter.md.
    assert re.findall(rf"(?<![/\w])(?:{python})\b", text) == []
    dashed = "|".join(name.replace("_", "-") for name in last if "_" in name)
    assert re.findall(rf"(?<![\w.-])(?:{dashed})\b", text) == []
    options = re.findall(r"--[a-z][a-z0-9.-]*[a-z0-9]", text)
    names = {option_name(field) for field in flat_fields(grpo.GrpoConfig)} | {"--help", "--debug", "--cache"}
    assert {option for option in options if option.replace("no-", "", 1) not in names} - names == set()
