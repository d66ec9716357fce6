"""Tasks from files: every line becomes an example or is refused with its number; keys, answer patterns, verifiers."""

import re

import pytest

from experiments.config import DataConfig
from experiments.tasks import Example, Message, make_task, split_of
from tests.experiments.lines import records, write

USER = {"role": "user", "content": "2+2?"}
OBJECT = "must be an object with role and content"
MANY_KEYS = ("{" + ", ".join(f'"{n}": 0' for n in range(40_000)) + ', "0": 1}').encode()


def load(path, **data):
    return DataConfig(**data).task(f"jsonl:{path}", seed=0)


def lines_of(task):
    return [task.example(index, split) for split in ("train", "held_out") for index in range(task.num_examples(split))]


def test_jsonl_keeps_every_line(tmp_path):
    lines = [{**record, "metadata": {"line": n}} for n, record in enumerate(records(100))]
    spec = f"jsonl:{write(tmp_path / 'a:b.jsonl', *lines, b'')}"
    task = make_task(spec)
    counts = {split: task.num_examples(split) for split in ("train", "held_out")}
    assert sum(counts.values()) == 100 and min(counts.values()) > 0
    drawn = {split: [task.example(index, split) for index in range(count)] for split, count in counts.items()}
    together = sorted(drawn["train"] + drawn["held_out"], key=lambda example: example.source["line"])
    assert [(example.prompt, example.answer) for example in together] == [(r["prompt"], r["answer"]) for r in lines]
    for split, found in drawn.items():
        assert all(split_of("jsonl", example.prompt) == split for example in found)
        assert found == sorted(found, key=lambda example: example.source["line"])
        with pytest.raises(ValueError, match=f"index: expected less than {counts[split]} .*, got {counts[split]}"):
            task.example(counts[split], split)
    assert task.name == spec and task.alphabet is None


def test_jsonl_counts_bytes_and_strips(tmp_path):
    lines = [*records(60), {"prompt": "größer?", "answer": " ääää\n"}]
    task = make_task(f"jsonl:{write(tmp_path / 'a', *lines)}")
    assert (task.max_prompt_tokens, task.max_answer_tokens) == (9, 10)
    odd = Example("größer?", " ääää\n")
    assert task.verify(odd, "ääää ") == 1.0 and task.verify(odd, "äää") == 0.0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "invalid JSON"),
        (b'{"prompt": "a", "answer": NaN}', "invalid JSON: NaN is not a number of JSON"),
        (b'{"prompt": "a", "answer": "1", "metadata": [-Infinity]}', "invalid JSON: -Infinity is not a number of JSON"),
        (b'{"prompt": "a", "answer": 1e999}', "expected numbers that float64 holds, got 1e999"),
        (b'{"prompt": "a", "answer": 1' + b"0" * 4300 + b"}", "expected integers of at most 4300 digits, got a longer one"),
        (None, "expected a JSON object, got NoneType"),
        ({"prompt": "a", "answer": True}, "'answer' must be a string, got bool"),
        ({"messages": [], "answer": "1"}, "'messages' is empty"),
        ({"messages": ["hello"], "answer": "1"}, f"'messages[0]' {OBJECT}, got str"),
        ({"messages": [USER, {"role": "", "text": ""}], "answer": "1"}, f"'messages[1]' {OBJECT}, got keys role, text"),
        ({"messages": [{"role": "a", "content": [{}]}], "answer": "1"}, "'messages[0].content' must be a string, got list"),
        ({"messages": [{"role": "user", "content": " "}], "answer": "1"}, "'messages[0].content' is empty"),
        ({"prompt": None, "answer": "1"}, "'prompt' must be a string, got NoneType"),
        ({"prompt": "", "answer": "1"}, "'prompt' is empty"),
        ({"prompt": "a", "answer": "1", "anwser": "2"}, "unknown key 'anwser'; a line has prompt, answer, metadata"),
        (b'{"prompt": "a", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid JSON: nested too deeply"),
        (b'{"prompt": "\xe9", "answer": "1"}', "invalid UTF-8 at byte 12"),
        (b'{"prompt": "a", "answer": ' + b"9" * 5_000 + b"}", ""),
        (records(1)[0], "duplicate prompt '0+1=', first on line 1"),
        (b'{"prompt": "a", "answer": "1", "answer": "2"}', "key 'answer' occurs twice in one object"),
        (MANY_KEYS, "key '0' occurs twice in one object"),
        ({"prompt": "a"}, "missing key 'answer'"),
        ({"answer": "1"}, "missing key 'prompt' or 'question' or 'messages'"),
        (
            {"prompt": "a", "question": "a", "answer": "1"},
            "keys 'prompt' and 'question' in one line; --data.prompt-key says which is the prompt",
        ),
        ({"prompt": "a", "answer": " "}, "'answer' is empty"),
        ({"prompt": "\ud800", "answer": "1"}, "'prompt' holds half of a surrogate pair"),
        ({"prompt": "x" * 20_000, "answer": "1"}, "'prompt' has 20000 bytes, more than --data.max-text-bytes 4096"),
        ({"prompt": "a", "answer": "1" * 5_000}, "'answer' has 5000 bytes, more than --data.max-text-bytes 4096"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_jsonl_refuses_lines(tmp_path, line, reason):
    path = write(tmp_path / "a.jsonl", *records(60), line, {"prompt": "z", "answer": "1"})
    with pytest.raises(ValueError, match=rf"^file {path}, line 61: {re.escape(reason)}.*\Z"):
        make_task(f"jsonl:{path}")


@pytest.mark.parametrize("missing", ["train", "held_out"])
def test_jsonl_refuses_an_empty_split(tmp_path, missing):
    lines = [record for record in records(60) if split_of("jsonl", record["prompt"]) != missing]
    with pytest.raises(ValueError, match=rf"got {len(lines)} lines and none of them {missing}; .* 50 lines or more"):
        make_task(f"jsonl:{write(tmp_path / 'a', *lines)}")


def test_prompts_may_be_questions_or_conversations(tmp_path):
    talk = [{"role": "system", "content": "Be brief."}, USER]
    lines = [*records(60), {"question": "why?", "answer": "so"}, {"messages": talk, "answer": "4"}]
    task = load(write(tmp_path / "a", *lines))
    found = {example.prompt: example.answer for example in lines_of(task)}
    assert found["why?"] == "so" and found[(Message("system", "Be brief."), Message("user", "2+2?"))] == "4"
    assert task.max_prompt_tokens == len("system: Be brief.\n\nuser: 2+2?")


def test_keys_are_mapped(tmp_path):
    lines = [{"problem": f"{n}+1=", "solution": n + 1, "level": n % 3, "prompt": "?"} for n in range(60)]
    path = write(tmp_path / "a", *lines)
    keys = {"prompt_key": "problem", "answer_key": "solution"}
    task = load(path, **keys, other_keys=True)
    for example in lines_of(task):
        number = int(example.prompt.removesuffix("+1="))
        assert example == Example(f"{number}+1=", str(number + 1), {"level": number % 3, "prompt": "?"})
    words = "line 1: unknown key 'level'; a line has problem, solution, metadata, or --data"
    with pytest.raises(ValueError, match=words):
        load(path, **keys)
    with pytest.raises(ValueError, match=f"file {path}, line 1: missing key 'query'"):
        load(path, prompt_key="query")


def test_a_pattern_says_which_part_of_the_answer_counts(tmp_path):
    """Lines as in GSM8K."""
    worked = [f"{n} and 1000 make <<{n}+1000={n + 1000}>>{n + 1000}.\n#### 1,{n:03}" for n in range(60)]
    lines = [{"question": f"{n} + 1000?", "answer": answer} for n, answer in enumerate(worked)]
    path = write(tmp_path / "a", *lines)
    task = load(path, answer_pattern="#### (.+)", verifier="numeric", extract=("answer_is", "last_number"))
    example = task.example(0, "train")
    number = int(example.prompt.split()[0])
    assert example.answer == f"1,{number:03}"
    assert task.verify(example, f"{number} + 1000 is {number + 1000}.0 in all") == 1.0
    assert task.verify(example, f"1000 + {number}") == float(number == 1000)
    exact = load(path, answer_pattern="#### (.+)")
    assert exact.verify(example, f" 1,{number:03}\n") == 1.0 and exact.verify(example, str(number + 1000)) == 0.0
    for bad in ("no marks 7", "#### 7\n#### 8", "####  "):
        broken = write(tmp_path / "b", *lines, {"question": "?", "answer": bad})
        with pytest.raises(ValueError, match="line 61: 'answer' must match --data.answer-pattern '#### .* once, got"):
            load(broken, answer_pattern="#### (.+)")


@pytest.mark.bad_input
def test_a_pattern_has_one_group(tmp_path):
    with pytest.raises(ValueError, match=r"^--data.answer-pattern: expected .* with one group, got 2 groups.*\Z"):
        load(write(tmp_path / "a", *records(60)), answer_pattern="a(b)(c)")


@pytest.mark.bad_input
def test_options_of_files_are_refused_with_a_task_of_ones_own():
    words = "^--data.answer-key: expected no value with a task other than jsonl:PATH, got solution"
    with pytest.raises(ValueError, match=words):
        DataConfig(answer_key="solution").user_task(make_task("addition"))
