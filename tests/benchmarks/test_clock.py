"""The clock of the benchmarks: only settled runs count, medians over turns, and failures are returned."""

import pytest

from benchmarks import clock as head_clock


class Clock:
    """A clock that only a call moves: by 8 seconds the first ``slow`` times, then by 2."""

    def __init__(self, slow):
        self.now, self.calls, self.slow = 0.0, 0, slow

    def __call__(self):
        return self.now

    def work(self):
        self.calls += 1
        self.now += 8.0 if self.calls <= self.slow else 2.0


def wait(out):
    return out


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(head_clock, "PATIENCE_SECONDS", 20.0)


@pytest.mark.parametrize("slow, at_least, seconds, calls", [(1, 16.0, 2.0, 5), (3, 16.0, 2.0, 5), (1, 1.0, 2.0, 2)])
def test_only_the_run_after_an_untimed_one_counts(slow, at_least, seconds, calls):
    clock = Clock(slow)
    assert head_clock.settled_seconds(clock.work, wait, at_least, clock) == seconds
    assert clock.calls == calls


def test_medians_of_turns_and_no_more_turns_for_what_is_very_slow():
    clock = Clock(0)
    fast, order, told = iter([1.0, 5.0, 3.0]), [], []

    def slow():
        order.append("slow")
        clock.now += 100.0

    def quick():
        order.append("quick")
        clock.now += 0.0 if len([x for x in order if x == "quick"]) % 2 else next(fast)

    calls = {"slow": (slow, wait), "quick": (quick, wait)}
    medians, failed = head_clock.time_in_turns(calls, 3, 1e-12, clock, told.append)
    assert medians == {"slow": (100.0, 1, (100.0,)), "quick": (3.0, 3, (1.0, 5.0, 3.0))} and not failed
    # Quartiles of 1, 3 and 5 seconds are 2 and 4; ratios to a call that was slower in the same turns are alike.
    assert head_clock.spread(medians["quick"].samples) == pytest.approx(2 / 3)
    assert medians["quick"].ratio_spread(head_clock.Timing(6.0, 3, (2.0, 10.0, 6.0))) == 0.0
    assert order.count("slow") == 2, "one turn: an untimed call and a timed one"
    assert told == [1, 2, 3]


def test_what_a_call_raises_is_handed_back_and_it_gets_no_further_turn():
    clock, tries = Clock(0), []

    def breaks():
        tries.append(1)
        raise RuntimeError("no room")

    medians, failed = head_clock.time_in_turns({"breaks": (breaks, wait), "works": (clock.work, wait)}, 3, 1.0, clock)
    assert list(medians) == ["works"] and medians["works"].turns == 3
    assert str(failed["breaks"]) == "no room" and len(tries) == 1
