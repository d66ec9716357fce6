"""The loop around a learner that is a counter: signals, saving by time, evaluations and logs across a resume."""

import dataclasses
import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from experiments.config import Config
from experiments.experience.experience import Experience
from experiments.experience.prompts import LengthLimits
from experiments.experience.rollout_metrics import RolloutMetrics
from experiments.learner.learner import LearnerState, StepResult
from experiments.learner.packing import Packing
from experiments.loop import feed, loop, session
from experiments.loop.evaluation import ExactMatch
from experiments.loop.feed import DocumentFeed
from experiments.loop.phase import Measured, Phase
from experiments.loop.queue import DocumentQueue
from experiments.models.attention import AttentionRun
from experiments.models.mesh import make_mesh, parse_mesh
from experiments.refusal import Refusal
from experiments.runs import checkpoint
from experiments.runs.checkpoint import complete_steps
from experiments.runs.config_file import save_config
from experiments.runs.console import RunConsole
from experiments.runs.ends import GuardAbort, Interrupted
from experiments.runs.folder import RunFolder, read_metrics
from experiments.runs.signals import caught_signals
from experiments.tasks.protocol import TaskFailed
from experiments.tasks.rewards import RewardFailed, RewardNotFinite
from jaxlogp import Document
from tests.experiments.tiny import contents, tiny


@pytest.fixture(autouse=True)
def interrupts_are_not_ignored():
    """A test run in a shell's background ignores SIGINT, and so would the loop."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Learner:
    """A learner whose state is one number."""

    version = 0

    def __init__(self, run):
        self.run, self.state = run, jnp.float32(0)
        self.packing = Packing(1, 1, 2, 4, 0)

    def step(self, documents, *, report_drift):
        (document,) = documents
        if int(document.reward) in self.run.refuse:
            return StepResult(refusal=Refusal("loss not finite"))
        self.state = self.state * 2 + 1
        return StepResult({"loss": float(self.state), "grad_norm": 1.0})

    def fault(self):
        return self.run.damage.get(f"unsound {self.run.step}")

    def mismatch(self):
        return self.run.damage.get(f"copies {self.run.step}")

    def saved(self):
        self.run.now(f"save {self.run.step}")
        return LearnerState({"state": self.state}, {})

    def template(self):
        return {"state": self.state}

    def restore(self, arrays, counters):
        self.state = arrays["state"]
        self.run.now("restored")

    def release(self):
        return self.state

    def keep_reference(self):
        """There is none."""

    def begin(self, state):
        """After the three steps of the warm start, and after nothing else, this is 0."""
        self.state = state - 7


class Run:
    """A run that counts: its source, evaluation and learner do something at some moments. Those of its warm start, which is
    another one, have a prefix."""

    def __init__(self, out, steps=6, at=None, prefix="", **changes):
        schedule = {"steps": steps, "docs_per_step": 1}
        self.config = tiny(out, "run", schedule=schedule, evaluation={"every": 2, "kl": False}, **changes)
        self.at, self.prefix = {} if at is None else at, prefix
        self.refuse, self.damage, self.out = (), {}, out
        self.learner, self.calls, self.step = Learner(self), 0, 0
        self.source = self.evaluation = self
        self.mesh, self.tokenizer = make_mesh(parse_mesh("")), None
        self.attention = AttentionRun("none", "nothing attends")
        self.sizes = LengthLimits(1, 1, 2, 1)

    def now(self, moment):
        self.at.pop(self.prefix + moment, lambda: None)()

    def feed(self):
        return DocumentFeed(self.source, self.learner.packing, 1, exact=False, rescore=False)

    def policy(self):
        return SimpleNamespace(end=lambda: None)

    params = None

    def policy_of(self, params):
        return None

    warms_up = True

    def warm_start(self):
        run = Run(self.out, at=self.at, prefix="warm start ")

        def evaluate(step):
            run.now(f"evaluation {step}")
            return Measured(step, {"exact_match": step / 10}, [])

        last = {"evaluates_ends": False, "is_reached": lambda scores: scores >= 3}
        return Phase("warm_start", "warm start", run, run.feed(), 9, evaluate, 1, **last)

    # The evaluation.

    scores = ExactMatch

    def of(self, policy):
        score = float(self.learner.state)
        self.now(f"evaluation {self.step}")
        values = {"exact_match_sampled": score}
        return SimpleNamespace(scores=ExactMatch(score, 0.0), metrics=lambda: values, samples=[])

    # The source.

    def next(self, policy):
        self.now(f"step {self.step + 1}")
        self.calls, self.step = self.calls + 1, self.step + 1
        return Experience((Document.of_completion([1], [2], [-0.5], reward=float(self.step)),))

    def state(self):
        return {"calls": self.calls}

    def restore(self, state):
        self.calls = self.step = state["calls"]


def nothing(*_):
    """Refuses nothing, and keeps no options of a resume."""


def refuse(*_):
    raise ValueError("refused")


RESUMED = SimpleNamespace(check=nothing, keep=nothing)
REFUSED = SimpleNamespace(check=refuse, keep=nothing)


def start(out, at=(), **options):
    """A run that does something at some moments; it, and how to run it."""
    run = Run(out, **options)
    run.at.update(at)
    path = out / "run"
    resumed = path.exists()
    folder = RunFolder.open(path) if resumed else RunFolder.create(out, "run")
    if not resumed:
        save_config(folder.config, run.config)
    return run, folder, lambda: session.run_to_end(run, folder, RunConsole(), RESUMED if resumed else None)


def send(number):
    return lambda: os.kill(os.getpid(), number)


def records(folder):
    """The log, without times."""
    logged = read_metrics(folder.metrics).records
    return [{name: value for name, value in each.items() if "second" not in name} for each in logged]


def evaluations(folder):
    return [record["step"] for record in read_metrics(folder.metrics).records if record["kind"] == "eval"]


@pytest.fixture(scope="module", autouse=True)
def warm_start_that_counts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "warm_start_phase", Run.warm_start)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trainer, folder, run = start(tmp_path_factory.mktemp("whole"))
    assert run()[:2] == (ExactMatch(0.0, 0.0), ExactMatch(63.0, 0.0))
    assert evaluations(folder) == [0, 2, 4, 6]
    return float(trainer.learner.state), records(folder)


def test_an_update_waits_until_what_is_saved_is_copied(tmp_path, monkeypatch):
    """It takes over the memory of the state."""
    saved, copied, copy, save, step = [], [], checkpoint.over_processes, Learner.saved, Learner.step

    def copy_slowly(leaf):
        time.sleep(0.1)
        copied.append(leaf)
        return copy(leaf)

    def step_after_copy(learner, documents, **options):
        assert len(copied) == len(saved)
        return step(learner, documents, **options)

    monkeypatch.setattr(checkpoint, "over_processes", copy_slowly)
    monkeypatch.setattr(Learner, "saved", lambda learner: saved.append(learner) or save(learner))
    monkeypatch.setattr(Learner, "step", step_after_copy)
    *_, run = start(tmp_path, steps=3, checkpoint={"every": 1})
    run()
    assert len(copied) > 3


@pytest.mark.parametrize("warms_up", [True, False])
def test_a_run_killed_before_its_first_checkpoint_takes_its_steps_again(tmp_path, capsys, monkeypatch, whole, warms_up):
    """From the end of its warm start, if it has one: no step waits for a checkpoint of what the run begins with."""
    monkeypatch.setattr(Run, "warms_up", warms_up)
    _, folder, run = start(tmp_path, {"step 4": lambda: twice(signal.SIGINT)})
    with pytest.raises(
        Interrupted, match="; step 3 of the warm start is saved; " if warms_up else "; nothing is saved; "
    ):
        run()
    logged = records(folder)
    assert [each["step"] for each in logged if each["kind"] == "train"] == [1, 2, 3]
    assert not complete_steps(folder.checkpoints) and folder.beginning.is_file()
    resumed, folder, run = start(tmp_path)
    # A source of the caller's own may have gone on.
    resumed.restore({"calls": 50})
    assert run()[0] == ExactMatch(0.0, 0.0) and resumed.calls == 6
    of_training = [each for each in whole[1] if "warm" not in each["kind"]]
    assert (float(resumed.learner.state), records(folder)) == (whole[0], whole[1] if warms_up else of_training)
    dropped = sum("warm" not in each["kind"] for each in logged)
    when = "after the checkpoint" if warms_up else "before there was a checkpoint"
    assert f"metrics.jsonl: {dropped} lines written {when} dropped" in capsys.readouterr().out
    assert not folder.beginning.exists() and not folder.warm_start.exists()


MOMENTS = {
    "warm start step 1": "1 of the warm start", "warm start evaluation 2": "2 of the warm start",
    "warm start save 3": "3 of the warm start", "evaluation 0": 0, "step 1": 1, "step 2": 2,
    "evaluation 2": 2, "step 6": 6, "evaluation 6": 6, "save 6": 6,
}  # fmt: skip


SIGNALS = [(moment, (signal.SIGTERM, signal.SIGINT)[number % 2]) for number, moment in enumerate(MOMENTS)]


@pytest.mark.parametrize(("moment", "number"), SIGNALS)
def test_a_signal_at_any_moment_saves_the_step_and_a_resume_gives_the_same_run(tmp_path, capsys, whole, moment, number):
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    trainer, folder, run = start(tmp_path, {moment: send(number)})
    with pytest.raises(Interrupted) as raised:
        run()
    assert raised.value.exit_code == 128 + number
    saved = MOMENTS[moment]
    assert moment != "step 2" or evaluations(folder) == [0], "the signal does not wait for an evaluation"
    assert complete_steps(folder.checkpoints)[-1:] == ([] if isinstance(saved, str) else [saved]) and trainer.step <= 6
    words = f"step {saved} is saved; to continue: python -m experiments.grpo .*--resume {folder.path}"
    assert re.fullmatch(f".*{words}.*", str(raised.value))
    assert before == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    resumed, folder, run = start(tmp_path)
    assert run()[0] == ExactMatch(0.0, 0.0)
    assert (float(resumed.learner.state), records(folder)) == whole
    assert f"at step {saved}" in capsys.readouterr().out and not folder.warm_start.exists()


def test_what_is_saved_is_said_with_the_command_that_goes_on(tmp_path):
    (tmp_path / "a b").mkdir()
    folder, config = RunFolder.create(tmp_path / "a b", "run"), tiny(tmp_path / "a b", "run")
    assert loop.resume_hint(folder, config) == f"the run folder {folder.path} is gone"
    save_config(folder.config, config)
    command = f"python -m experiments.grpo --resume '{folder.path}'"
    assert loop.resume_hint(folder, config) == f"nothing is saved; to begin again: {command}"
    for checkpoints, where in ((folder.warm_start, " of the warm start"), (folder.checkpoints, "")):
        for step in (3, 12):
            (checkpoints / str(step)).mkdir(parents=True)
        assert loop.resume_hint(folder, config) == f"step 12{where} is saved; to continue: {command}"
    supervised = dataclasses.replace(config, task="sft:a.jsonl")
    words = f"step 12 is saved; to train up to step N: {command.replace('grpo', 'sft')} --schedule.steps N"
    assert loop.resume_hint(folder, supervised, finished=True) == words


def twice(number):
    send(signal.SIGTERM)()
    send(number)()


def test_the_second_interrupt_ends_at_once_and_a_second_sigterm_changes_nothing(tmp_path, capfd):
    trainer, _, run = start(tmp_path, {"step 3": lambda: twice(signal.SIGINT)})
    with pytest.raises(Interrupted) as raised:
        run()
    assert raised.value.exit_code == 130 and trainer.step == 2
    assert str(raised.value).startswith("SIGINT twice: stopped at once; step 3 of the warm start is saved; ")
    assert capfd.readouterr().err == "SIGTERM: the step in progress ends first; Ctrl-C ends it at once\n"
    with pytest.raises(Interrupted, match="step 3 is saved"):
        start(tmp_path, {"step 3": lambda: twice(signal.SIGTERM)})[2]()


def test_signals_are_left_alone_where_they_are_ignored_and_outside_of_the_main_thread():
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with caught_signals() as signals:
            send(signal.SIGINT)()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and signals.received is None
    finally:
        signal.signal(signal.SIGINT, old)
    seen = []

    def other():
        with caught_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [old]


@pytest.mark.parametrize("minutes, seconds, wanted", [(1, 25.0, [3, 6]), (0, 25.0, [6]), (0.1, 7.0, [*range(1, 7)])])
def test_checkpoints_by_time(tmp_path, monkeypatch, minutes, seconds, wanted):
    """By a clock that does not jump: the time of day is not there to be read."""
    now = SimpleNamespace(value=1000.0)

    def tick():
        now.value += seconds

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now.value, perf_counter=time.perf_counter))
    saved = []
    at = {f"step {step}": tick for step in range(1, 7)}
    at |= {f"save {step}": lambda step=step: saved.append(step) for step in range(7)}
    _, _, run = start(tmp_path, at, checkpoint={"every_minutes": minutes})
    run()
    assert saved == wanted


def test_drift_is_reported_in_the_first_step_that_can_and_then_every_so_often(tmp_path, monkeypatch):
    """No token of step 1 tells a difference."""
    asked, step = [], Learner.step
    drift = SimpleNamespace(seconds=0.0, metrics=lambda tokenizer: {}, lines=lambda tokenizer: [])

    def step_with_drift(learner, documents, *, report_drift):
        asked.extend([learner.run.step] * report_drift)
        found = drift if report_drift and learner.run.step > 1 else None
        return dataclasses.replace(step(learner, documents, report_drift=report_drift), drift=found)

    monkeypatch.setattr(Learner, "step", step_with_drift)
    _, folder, run = start(tmp_path, drift={"every": 2})
    run()
    logged = [record["step"] for record in read_metrics(folder.metrics).records if record["kind"] == "drift"]
    assert asked == [1, 2, 4, 6] and logged == [2, 4, 6]


def test_a_record_says_what_a_step_took_and_what_was_drawn_for_it(tmp_path, monkeypatch, capsys):
    """Two seconds of drawing, one of packing, four of the step itself, and eight of a drift report, which is apart."""
    now, drawn = SimpleNamespace(value=0.0), RolloutMetrics(groups=1, completions=4, truncated=2, tokens=8)
    draw, pack, step = Run.next, DocumentQueue.rounds, Learner.step
    drift = SimpleNamespace(seconds=8.0, metrics=lambda tokenizer: {}, lines=lambda tokenizer: [])

    def passes(seconds, result):
        now.value += seconds
        return result

    def measured(learner, documents, **options):
        step(learner, documents, **options)
        found = None if learner.run.prefix else drift
        return passes(12.0, StepResult({"loss": 0.0, "grad_norm": learner.run.step, "tokens": 21}, drift=found))

    for module in (loop, feed):
        clock = SimpleNamespace(perf_counter=lambda: now.value, monotonic=time.monotonic)
        monkeypatch.setattr(module, "time", clock)
    counted = lambda run, policy: dataclasses.replace(draw(run, policy), counts=drawn)  # noqa: E731
    monkeypatch.setattr(Run, "next", lambda run, policy: passes(2.0, counted(run, policy)))
    monkeypatch.setattr(DocumentQueue, "rounds", lambda *given: passes(1.0, pack(*given)))
    monkeypatch.setattr(Learner, "step", measured)
    _, folder, run = start(tmp_path, steps=10)
    run()
    logged = [each for each in read_metrics(folder.metrics).records if each["kind"] == "train"]
    names = ("rollout_seconds", "data_wait_seconds", "step_seconds", "tokens_per_second", "truncated_share")
    assert [[each[name] for name in names] for each in logged] == [[2.0, 3.0, 7.0, 3.0, 0.5]] * 10
    # The medians of norms 1 to 8 and 1 to 9 are 4.5 and 5.
    assert [each["grad_norm_over_median"] for each in logged] == [None] * 8 + [2.0, 2.0]
    assert "step 1: 2 of 4 completions were truncated at 1 tokens" in capsys.readouterr().out


@pytest.mark.bad_input
def test_a_run_that_lost_its_checkpoints_is_not_begun_again(tmp_path):
    _, folder, run = start(tmp_path)
    run()
    lines = folder.metrics.read_bytes()
    for step in complete_steps(folder.checkpoints):
        (folder.checkpoints / str(step)).rename(tmp_path / f"lost-{step}")
    _, _, run = start(tmp_path)
    words = "checkpoints: expected at least one complete step in .*, got none after 6 steps"
    with pytest.raises(ValueError, match=f"^{words}$"):
        run()
    assert folder.metrics.read_bytes() == lines


def test_a_finished_run_is_scored_again_and_logs_nothing(tmp_path, capsys, whole):
    start(tmp_path)[2]()
    trainer, folder, run = start(tmp_path)
    (folder.checkpoints / "031").mkdir()
    assert run()[:2] == (ExactMatch(0.0, 0.0), ExactMatch(63.0, 0.0))
    assert (float(trainer.learner.state), records(folder)) == whole
    assert "WARNING: '031' in " in capsys.readouterr().out
    assert Config().checkpoint.every_minutes == 10.0


def test_refused_steps_in_a_row_end_the_run_with_the_good_state(tmp_path, capsys):
    trainer, folder, run = start(tmp_path, guards={"max_refused_steps": 3})
    trainer.refuse = (1, 3, 4, 5)
    with pytest.raises(GuardAbort) as raised:
        run()
    words = "step 5 is the last of 3 refused in a row: loss not finite; step 5 is saved; to continue: python -m "
    assert str(raised.value).startswith(words) and raised.value.exit_code == 4
    assert float(trainer.learner.state) == 1.0 and complete_steps(folder.checkpoints)[-1] == 5
    assert capsys.readouterr().out.count("is refused: loss not finite") == 4
    logged = [each for each in read_metrics(folder.metrics).records if each["kind"] == "train"]
    said = [(each["update_applied"], each.get("refused")) for each in logged]
    assert said == [(0, "loss not finite"), (1, None), *[(0, "loss not finite")] * 3]
    again, _, run = start(tmp_path, guards={"max_refused_steps": 3})
    again.refuse = (6,)
    run()
    assert again.step == 6 and float(again.learner.state) == 1.0, "a resume counts anew"


@pytest.mark.parametrize(
    ("damage", "words", "saved"),
    [
        ("unsound 6", "step 6: not saved: parameters not finite in w; step 3 is saved; ", [3]),
        ("copies 6", "step 6: copies differ: parameters not finite in w; step 3 is saved; ", [3]),
        (
            "copies 3",
            "step 3: not saved, copies differ: parameters not finite in w; step 3 of the warm start is saved; ",
            [],
        ),
    ],
)
def test_a_damaged_state_is_never_saved(tmp_path, damage, words, saved):
    trainer, folder, run = start(tmp_path, checkpoint={"every": 3}, guards={"replica_every": 2})
    trainer.damage[damage] = "parameters not finite in w"
    with pytest.raises(GuardAbort) as raised:
        run()
    assert str(raised.value).startswith(words) and complete_steps(folder.checkpoints) == saved


@pytest.mark.parametrize(
    ("moment", "saved"), [("step 4", 3), ("evaluation 4", 4), ("evaluation 0", None), ("warm start evaluation 2", None)]
)
@pytest.mark.parametrize("error", [RewardFailed, RewardNotFinite, TaskFailed])
def test_a_broken_reward_or_task_ends_the_run_with_a_checkpoint(tmp_path, whole, moment, saved, error):
    """A reward that is not finite is an end in an evaluation only; a trainer refuses the step for it."""

    def fail():
        raise error("reward 'odd': got KeyError: 'a'")

    _, folder, run = start(tmp_path, {moment: fail})
    with pytest.raises(GuardAbort) as raised:
        run()
    assert str(raised.value).startswith("reward 'odd': got KeyError: 'a'; ")
    assert isinstance(raised.value.__cause__, error)
    assert complete_steps(folder.checkpoints)[-1:] == ([] if saved is None else [saved])
    trainer, folder, run = start(tmp_path)
    run()
    assert (float(trainer.learner.state), records(folder)) == whole


@pytest.mark.bad_input
def test_a_checkpoint_that_cannot_be_trained_on_is_refused(tmp_path):
    start(tmp_path)[2]()
    trainer, _, run = start(tmp_path)
    trainer.damage["unsound 6"] = "parameters not finite in w"
    words = r"\(an older one: --resume RUN@STEP\), got parameters not finite in w"
    with pytest.raises(ValueError, match=f"^checkpoint step 6: expected a state .* {words}$"):
        run()


REFUSALS = {
    "what is not trained is another": lambda trainer: trainer.at.update({"restored": refuse}),
    "a state that cannot be trained on": lambda trainer: trainer.damage.update({"unsound 4": "not finite"}),
    "a goal that it has passed, or too little memory": lambda trainer: None,
}


@pytest.mark.bad_input
@pytest.mark.parametrize("why", REFUSALS)
def test_a_resume_that_is_refused_late_changes_nothing(tmp_path, why):
    """Back to step 4 of 6: later lines would be cut off, and step 6 put aside."""
    start(tmp_path, checkpoint={"every": 2})[2]()
    trainer, folder, _ = start(tmp_path)
    REFUSALS[why](trainer)
    before = contents(folder)
    with pytest.raises(ValueError, match="refused|trained on"):
        session.run_to_end(trainer, folder, RunConsole(), REFUSED, 4)
    assert contents(folder) == before
    trainer = start(tmp_path)[0]
    session.run_to_end(trainer, folder, RunConsole(), RESUMED, 4)
    assert float(trainer.learner.state) == 63.0 and (folder.checkpoints / "quarantine" / "6-0").is_dir()


@pytest.mark.bad_input
def test_a_warm_start_that_cannot_continue_keeps_its_lines(tmp_path):
    _, folder, run = start(tmp_path, {"warm start step 2": send(signal.SIGTERM)})
    with pytest.raises(Interrupted):
        run()
    before = contents(folder)
    assert before["metrics.jsonl"]
    with pytest.raises(ValueError, match="refused"):
        session.run_to_end(start(tmp_path)[0], folder, RunConsole(), REFUSED)
    assert contents(folder) == before
