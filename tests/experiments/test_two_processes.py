"""Runs of two processes, a simulated device each, over gloo: their bits, and their end."""

import json
import shutil
import signal

import pytest

from benchmarks.trials.processes import MAIN, TINY, start, start_together, stop_when, wait
from benchmarks.trials.saved_arrays import array_digests
from experiments.runs.checkpoint import complete_steps
from experiments.runs.folder import read_metrics

pytestmark = pytest.mark.slow

DOCUMENTS = 18
"""Of a rollout."""
PROBLEMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
NOT_FINITE = f"""
import jax
from experiments.learner.packing import GlobalMicroBatch
micro_batch = GlobalMicroBatch.micro_batch
def of_own_rank(self, rank):
    assert jax.process_count() == 1 or rank == jax.process_index(), "a process packs for its own devices"
    return micro_batch(self, rank)
GlobalMicroBatch.micro_batch = of_own_rank
from experiments.tasks.rewards import RewardNotFinite, Rewards
from experiments.experience.rollouts import Rollouts
parts, make = Rewards.parts, Rollouts.__init__
def begin(rollouts, prompts, *given):
    make(rollouts, prompts, *given)
    first = prompts._task.example(prompts._order[0], "train").prompt
    def of_one_process(rewards, examples, completions, numbers):
        # Of a rollout, by whichever process scores its second completion.
        if len(examples) == {DOCUMENTS} and 1 in numbers and examples[1].prompt == first:
            raise RewardNotFinite("reward of the second completion: got nan")
        return parts(rewards, examples, completions, numbers)
    Rewards.parts = of_one_process
Rollouts.__init__ = begin
{MAIN}
"""
FAULT = f"""
import os, sys
from experiments.loop.feed import DocumentFeed
plain, steps, last = DocumentFeed.take, [], sys.argv[sys.argv.index("--process-id") + 1] == "1"
def take(feed, policy):
    steps.append(feed)
    # In the second step of the training: the warm start draws from a feed too.
    if last and steps.count(feed) == 2 and isinstance(feed._source, Rollouts):
        raise OSError(28, "No space left on device", "/x")
    return plain(feed, policy)
DocumentFeed.take = take
{NOT_FINITE}
"""


@pytest.fixture
def cache(tmp_path_factory, cheap_processes):
    """Of what the processes compile, cheaply: all of them alike."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """A run whose data ends in the middle of a step, after a round in which one rank has no document."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in PROBLEMS))
    sizes = (
        "--schedule.rows 1 --schedule.row-length 16 --rollout.max-new-tokens 4 --rollout.prompts-per-rollout 6 "
        f"--rollout.num-generations {DOCUMENTS // 6} --schedule.docs-per-step 24 --schedule.epochs 1 "
        "--warm-start.max-steps 2 --drift.every 0 --evaluation.every 0 --evaluation.no-kl --mesh data=2 "
        # Two numbers that follow from a whole step.
        "--correction.level token --correction.high 2 --correction.normalize --loss.entropy-target 1"
    )
    return [*TINY, "--task", f"jsonl:{path}", *sizes.split()]


def saved(run, step=None):
    """Digests of every array of a checkpoint, and its counters."""
    step = max(complete_steps(run / "checkpoints")) if step is None else step
    place = run / "checkpoints" / str(step)
    record = json.loads((place / "manifest.json").read_text())["content"]["record"]
    counters = {name: record[name] for name in ("progress", "learner", "feed", "before")}
    return step, array_digests(place), counters


def losses(run):
    records = read_metrics(run / "metrics.jsonl").records
    steps = [each for each in records if each["kind"] == "train"]
    return [(each["step"], each.get("loss", each.get("refused")), each.get("num_documents", 0)) for each in steps]


def test_a_run_goes_from_one_to_two_processes_and_back_through_faults_and_signals(options, cache, tmp_path):
    """With the bits of one that one process has computed without a break; step 1 is refused, for what one process sees."""
    whole = [*options, "--out", str(tmp_path), "--name", "whole"]
    assert wait(start(whole, cache, devices=2, main=NOT_FINITE)).code == 0
    run, resume = tmp_path / "run", ["--resume", str(tmp_path / "run"), "--quiet"]

    def further():
        """Says when the run has saved one more step than now."""
        wanted = max(complete_steps(run / "checkpoints")) + 1
        return lambda: (run / "checkpoints" / str(wanted)).exists()

    # A fault of one of two, which both report.
    both = start_together([*options, "--out", str(tmp_path), "--name", "run"], cache, 2, main=FAULT)
    ends = [wait(each) for each in both]
    assert [end.code for end in ends] == [3, 3], ends
    assert ends[0].last == "error: process 1 ended: /x: No space left on device"
    assert ends[1].last == "error: process 1: /x: No space left on device"
    # One goes on.
    one = start(resume, cache, devices=2, main=NOT_FINITE)
    assert stop_when(one, further(), 0.0, signal.SIGTERM) and wait(one).code == 143
    # SIGTERM to one of two ends both.
    both = start_together(resume, cache, 2, main=NOT_FINITE)
    assert stop_when(both[1], further(), 0.0, signal.SIGTERM)
    ends = [wait(each) for each in both]
    assert [end.code for end in ends] == [143, 143], ends
    assert ends[0].last.startswith("error: SIGTERM to process 1: step ") and "--resume" in ends[0].last
    # SIGKILL to one of two is in test_reliability_trials.py.
    assert [wait(each).code for each in start_together(resume, cache, 2, main=NOT_FINITE)] == [0, 0]
    whole = tmp_path / "whole"
    assert saved(run) == saved(whole) and losses(run) == losses(whole)
    assert losses(whole)[0] == (1, "reward of the second completion: got nan", 0)
    documents = [count for *_, count in losses(whole)]
    assert 0 < documents[-1] < 24 and sum(documents) % 2 == 1, "the data ends within a step, and on one rank first"


def test_two_processes_go_on_with_an_invariant_run_of_one_to_the_same_bits(cache, tmp_path):
    """Ranks of both processes in the training, tensor ranks of both in the rollouts."""
    sizes = (
        "--invariant --invariance.block 4 --schedule.steps 2 --schedule.row-length 8 --rollout.prompts-per-rollout 8 "
        "--warm-start.max-steps 3 --warm-start.learning-rate 1e-2 --drift.every 0 --evaluation.every 0 --evaluation.no-kl "
        f"--evaluation.num-prompts 4 --out {tmp_path}"
    )
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert wait(start([*TINY, *sizes.split(), "--name", "whole"], cache, devices=1)).code == 0
    shutil.copytree(whole, run)
    resume = ["--resume", f"{run}@1", "--mesh", "data=2", "--rollout.mesh", "tensor=2", "--quiet"]
    assert [wait(each).code for each in start_together(resume, cache, 2)] == [0, 0]
    (step, digests, counters), (wanted_step, wanted_digests, wanted_counters) = saved(run), saved(whole)
    assert step == wanted_step == 2 and digests == wanted_digests and losses(run) == losses(whole)
    assert counters == wanted_counters and counters["feed"]["queued"] == [], "a step takes a whole rollout"
    steps = [each for each in read_metrics(run / "metrics.jsonl").records if each["kind"] == "train"]
    assert [each["computed/drift_max"] for each in steps] == [0.0, 0.0]
    assert all(each["grad_norm"] > 0.0 for each in steps)


def test_processes_with_different_options_are_refused(options, cache, tmp_path):
    main = f"import sys; sys.argv += ['--seed', sys.argv[sys.argv.index('--process-id') + 1]]; {MAIN}"
    ends = [wait(each) for each in start_together([*options, "--out", str(tmp_path)], cache, 2, main=main)]
    assert [end.code for end in ends] == [2, 2], ends
    here = "--seed: expected in process 1 that of process 0, 0, got 1"
    there = "process 1 ended: --seed: expected in process 0 that of process 1, 1, got 0"
    assert ends[0].last in (f"error: {here}", f"error: {there}")
    assert not list(tmp_path.iterdir())
