"""Compiled programs that a second run finds again."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks.trials.processes import TINY
from experiments import compilation_cache
from experiments.compilation_cache import remove_oldest, take_cache_option, use_compilation_cache

ROOT = Path(__file__).parents[2]
COMMAND = [each for each in TINY if each != "--quiet"]
COMMAND += "--warm-start.max-steps 1 --schedule.steps 1 --evaluation.num-prompts 4".split()


def test_the_option_is_taken_out_of_a_command_line_and_needs_a_value():
    assert take_cache_option(["a", "--cache=/x", "--cached", "1"]) == ("/x", ["a", "--cached", "1"])
    for arguments in (["--cache"], ["--cache="], ["--cache", "--seed", "1"]):
        with pytest.raises(ValueError, match="^--cache: expected a folder or none, got "):
            take_cache_option(arguments)


def test_entries_that_were_used_last_stay(tmp_path):
    for number in range(5):
        path = tmp_path / str(number)
        path.write_bytes(bytes(10))
        os.utime(path, (100 - number, 0))
    remove_oldest(tmp_path, 50)
    assert len(list(tmp_path.iterdir())) == 5
    remove_oldest(tmp_path, 29)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize(
    "choice, variable, distributed, told, wanted",
    [
        (None, None, False, None, "default"), (None, None, True, None, None), (None, None, False, "jax", None),
        (None, "none", False, None, None), (None, "own", False, "jax", "own"), ("own", "none", True, None, "own"),
    ],
)  # fmt: skip
def test_which_folder_is_taken(monkeypatch, tmp_path, choice, variable, distributed, told, wanted):
    changes = {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax.config, "update", changes.__setitem__)
    monkeypatch.setattr(compilation_cache, "_folder_of_jax", lambda: told)
    monkeypatch.setattr(compilation_cache, "_default_folder", lambda: Path("default"))
    monkeypatch.setattr(compilation_cache, "_listen", lambda: None)
    monkeypatch.delenv("JAXLOGP_CACHE")
    if variable is not None:
        monkeypatch.setenv("JAXLOGP_CACHE", variable)
    use_compilation_cache(choice, distributed=distributed)
    assert changes.get("jax_compilation_cache_dir") == wanted
    assert [path.name for path in tmp_path.iterdir()] == [wanted] * (wanted is not None)


def test_a_folder_that_cannot_be_made_is_refused_only_if_it_was_asked_for(monkeypatch, tmp_path):
    """Nor has a user without a home a cache."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").write_text("")
    monkeypatch.delenv("JAXLOGP_CACHE")
    monkeypatch.setattr(compilation_cache, "_folder_of_jax", lambda: None)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    use_compilation_cache(None)
    with pytest.raises(ValueError, match="^--cache: expected a folder, or none, got .*: Not a directory"):
        use_compilation_cache(str(tmp_path / "file" / "folder"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    use_compilation_cache(None)
    with pytest.raises(ValueError, match="^--cache: expected a folder, or none, got ~nobody-here/x: "):
        use_compilation_cache("~nobody-here/x")


@pytest.mark.slow
@pytest.mark.costly
def test_a_second_run_compiles_nothing_and_damage_is_compiled_again(tmp_path, cheap_processes):
    def lines(name: str) -> list[str]:
        command = [sys.executable, "-m", "experiments.grpo", *COMMAND, "--out", str(tmp_path), "--name", name]
        command += ["--cache", str(tmp_path / "cache")]
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert finished.returncode == 0, finished.stderr
        return [line for line in finished.stdout.splitlines() if line.startswith(("programs: ", "held-out"))]

    first, second = lines("first"), lines("second")
    assert " 0 compiled, " not in first[0] and second[0].startswith("programs: 0 compiled, ")
    assert first[1:] == second[1:]
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:20])
    assert lines("third")[1:] == first[1:]
