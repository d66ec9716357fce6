"""The trial of corrupted checkpoints and run folders, each damage once."""

import pytest

from benchmarks.trials.corruption import attempt, damage
from benchmarks.trials.corruption.__main__ import CorruptionConfig, Subject, main, outcomes, small
from benchmarks.trials.corruption.cases import Case
from experiments.runs import checkpoint


@pytest.mark.slow
def test_no_damage_is_silent_and_none_a_traceback(tmp_path, capsys):
    verdicts = main(CorruptionConfig(checkpoint=0, folder=0, out=str(tmp_path / "report.md")))
    for part, counts in verdicts.items():
        assert counts[attempt.SILENT] == counts[attempt.TRACEBACK] == 0, part
    # Some of Orbax's files are the same in both steps, so that one in the place of the other is no damage.
    assert verdicts["newest checkpoint"].keys() == {attempt.SENTENCE, attempt.UNTOUCHED}
    assert verdicts["run folder"].keys() == {attempt.SENTENCE, attempt.REFUSED, attempt.UNTOUCHED}
    assert "| **all 152** |" in (tmp_path / "report.md").read_text()


def broken_array(folder, canary, rng):
    files = (path for path in (folder / "checkpoints" / "20" / "arrays").rglob("*") if path.is_file())
    damage.flip_a_bit(max(files, key=lambda path: path.stat().st_size), rng)


def linked_curves(folder, canary, rng):
    (folder / "curves.png").symlink_to(canary / "file")


@pytest.mark.slow
def test_the_trial_sees_what_it_is_for(tmp_path, monkeypatch):
    """Negative controls: other numbers are silent, so is a file written through a link; a crash is a fault."""
    subject: Subject = small(tmp_path)
    flip, link = Case("arrays", "flip", broken_array), Case("curves.png", "link", linked_curves)

    def verdict(case):
        return outcomes(subject, [case], tmp_path, 0)[0].verdict

    assert (verdict(flip), verdict(link)) == (attempt.SENTENCE, attempt.UNTOUCHED)
    monkeypatch.setattr(attempt, "replace_file", lambda path, content: path.write_bytes(content))
    assert verdict(link) == attempt.SILENT
    read = checkpoint.read_arrays

    def careless(folder, content, wanted):
        return {name: array - 1 for name, array in read(folder, content, wanted).items()}

    monkeypatch.setattr(checkpoint, "read_arrays", careless)
    assert verdict(flip) == attempt.SILENT
    monkeypatch.setattr(checkpoint, "read_arrays", lambda *given: 1 // 0)
    assert verdict(flip) == attempt.TRACEBACK
