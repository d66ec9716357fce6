"""`DocumentSchedule.collect` in two real processes that have data of their own."""

import json

import pytest

from benchmarks.trials.processes import start_together, wait

PROGRAM = """
import json, sys
import numpy as np
from jax.experimental import multihost_utils
from experiments.processes import start
from jaxlogp import Document, DocumentSchedule, pack_documents

_, arguments = sys.argv[0], sys.argv[1:]
value = lambda name: arguments[arguments.index(name) + 1]
index = int(value("--process-id"))
start(value("--coordinator"), int(value("--num-processes")), index)
document = Document.of_completion([3], [4, 5], np.zeros(2), advantages=1.0)
batch = lambda count: pack_documents([document] * count, rows=4, row_length=4)[0]
counts = {case: each[index] for case, each in json.loads(value("--cases")).items()}
found = {}
for case, mine in counts.items():
    def stream():
        for count in mine:
            if count < 0:
                raise OSError("no file")
            yield batch(count)
    schedule = DocumentSchedule(docs_per_step=6, max_empty_micro_batches=3)
    batches, steps = stream(), []
    try:
        while True:
            step = schedule.collect([batches], padding=batch(0),
                all_reduce=lambda x: multihost_utils.process_allgather(x).sum(axis=0))
            local = [int(each.num_documents) for (each,) in step.micro_batches]
            steps.append([local, step.num_documents, step.exhausted])
            if step.exhausted:
                break
    except Exception as error:
        steps.append(f"{type(error).__name__}: {error}")
    found[case] = steps
with open(value("--out") + f"/{index}.json", "w") as stream:
    json.dump(found, stream)
"""
CASES = {
    "equal": ([2, 2], [1, 1]),
    "target overshot by the last round": ([4, 4, 1], [4, 4, 1]),
    "a rank without documents in a round": ([3, 0, 3], [0, 2, 0]),
    "the data ends on one rank": ([1], [1, 1, 1, 1, 1, 1, 1]),
    "nothing anywhere": ([], []),
    "documents on no rank": ([0] * 9, [0] * 9),
    "one raises": ([2, 2, 2], [1, -1]),
}
"""Documents of each process's micro-batches; the target is 6 of both together, -1 raises."""
BOTH = {
    "equal": [6, False, 0, True],
    "target overshot by the last round": [8, False, 8, False, 2, True],
    "a rank without documents in a round": [8, False, 0, True],
    "the data ends on one rank": [6, False, 2, True],
    "nothing anywhere": [0, True],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each process says of each case."""
    out = tmp_path_factory.mktemp("collected")
    both = start_together(["--out", str(out), "--cases", json.dumps(CASES)], out / "cache", 2, main=PROGRAM)
    ends = [wait(each) for each in both]
    assert [end.code for end in ends] == [0, 0], ends
    return [json.loads((out / f"{index}.json").read_text()) for index in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", BOTH)
def test_all_processes_stop_after_the_same_round_with_the_same_counts(found, case):
    first, second = (each[case] for each in found)
    assert [step[1:] for step in first] == [step[1:] for step in second]
    assert [part for step in first for part in step[1:]] == BOTH[case]
    for mine, theirs in zip(first, second, strict=True):
        assert len(mine[0]) == len(theirs[0]) and sum(mine[0]) + sum(theirs[0]) == mine[1]
    for steps, given in zip((first, second), CASES[case], strict=True):
        assert sum(sum(step[0]) for step in steps) == sum(given), "no document is dropped"


@pytest.mark.slow
def test_rounds_without_documents_and_a_stream_that_raises_end_it_everywhere(found):
    for each in found:
        assert each["documents on no rank"][0].startswith("ValueError: streams: expected a document within 3")
    assert found[0]["one raises"][-1].startswith("RuntimeError: streams: data streams raised on 1 other process")
    assert found[1]["one raises"][-1] == "OSError: no file"
