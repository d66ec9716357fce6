"""Prompts as the model reads them: instructions, system messages and conversations, through a chat template or refused."""

import dataclasses
import sys
import types

import pytest

from experiments.config import DataConfig, RolloutConfig, ScheduleConfig
from experiments.experience.prompts import PromptStream, encode, encode_prompt, length_limits, longest_prompt
from experiments.models.mesh import MeshSpec
from experiments.models.tokenizer import ByteTokenizer, tokenizer_for
from experiments.tasks import Message, make_task
from tests.experiments.lines import records, write
from tests.experiments.tiny_directory import write_tiny_directory

TALK = [{"role": role, "content": text} for role, text in (("user", "2+2?"), ("assistant", "4"), ("user", "again"))]


def task_of(name="addition", **data):
    return DataConfig(**data).task(name, seed=0)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Of one directory, with its chat template and without."""
    from experiments.models.huggingface.tokenizer import load_tokenizer

    path = write_tiny_directory(tmp_path_factory.mktemp("model") / "a", num_hidden_layers=1)
    return load_tokenizer(path), load_tokenizer(path, chat_template=False)


def shown(tokenizer, prompt):
    return tokenizer.inner.decode(encode(tokenizer, prompt), skip_special_tokens=False)


def sizes_of(task, tokenizer, **rollout):
    return length_limits(task, tokenizer, RolloutConfig(**rollout), ScheduleConfig(), mesh=MeshSpec())


def test_a_prompt_is_encoded_once_for_each_tokenizer(tokenizers, monkeypatch):
    """What a caller does with the ids is no matter to the next one."""
    asked, plain = [], type(tokenizers[0]).encode_prompt
    spy = lambda tokenizer, text: asked.append(text) or plain(tokenizer, text)  # noqa: E731
    monkeypatch.setattr(type(tokenizers[0]), "encode_prompt", spy)
    for tokenizer in tokenizers:
        first = encode(tokenizer, "asked twice")
        wanted = first.copy()
        first.append(0)
        assert encode(tokenizer, "asked twice") == wanted == plain(tokenizer, "asked twice")
    assert asked == ["asked twice"] * 2


def test_an_instruction_stands_behind_every_prompt_and_the_split_stays():
    plain, task = make_task("addition"), task_of(instruction="Write digits.")
    for split in ("train", "held_out"):
        asked, example = task.example(3, split), plain.example(3, split)
        assert asked == dataclasses.replace(example, prompt=f"{example.prompt}\n\nWrite digits.")
    assert task.max_prompt_tokens == plain.max_prompt_tokens + len("\n\nWrite digits.")
    assert task.verify(example, example.answer) == 1.0 and task.verify(example, f"It is {example.answer}") == 0.0


def test_a_conversation_gets_its_system_message_and_its_instruction(tmp_path):
    path = write(tmp_path / "a", *records(60), {"messages": TALK, "answer": "4"})
    task = task_of(f"jsonl:{path}", system="Be brief.", instruction="Digits.")
    sizes = {split: task.num_examples(split) for split in ("train", "held_out")}
    prompts = [task.example(i, split).prompt for split, size in sizes.items() for i in range(size)]
    wanted = (Message("system", "Be brief."), Message("user", "2+2?"), Message("assistant", "4"))
    assert (*wanted, Message("user", "again\n\nDigits.")) in prompts
    assert (Message("system", "Be brief."), Message("user", "7+1=\n\nDigits.")) in prompts
    assert max(len("".join(each.content for each in prompt)) for prompt in prompts) <= task.max_prompt_tokens


def test_texts_and_conversations_go_through_the_chat_template(tokenizers, tmp_path):
    tokenizer, plain = tokenizers
    task = task_of("word_problems:2", system="Be brief.", instruction="End with the number.")
    example = task.example(0, "train")
    story = make_task("word_problems:2").example(0, "train").prompt
    wanted = f"<|system|>Be brief.<|end|><|user|>{story}\n\nEnd with the number.<|end|><|model|>"
    assert shown(tokenizer, example.prompt) == wanted
    assert shown(tokenizer, story) == f"<|user|>{story}<|end|><|model|>"
    assert shown(plain, story) == story
    # A bound where examples have no end, the true length where they have one.
    endless = task_of("addition:3", system="Be brief.")
    bound = sizes_of(endless, tokenizer).prompt
    longest = max(len(encode(tokenizer, endless.example(i, "train").prompt)) for i in range(50))
    assert longest <= bound <= longest + 4
    path = write(tmp_path / "a", *records(60), {"messages": TALK, "answer": "4"})
    file = make_task(f"jsonl:{path}")
    assert longest_prompt(file, tokenizer) == len(encode(tokenizer, tuple(Message(**each) for each in TALK)))
    assert sizes_of(file, tokenizer, max_new_tokens=7).completion == 7


def test_finite_prompts_are_counted_for_our_own_tokenizers_too(tmp_path):
    path = write(tmp_path / "a", *records(60), {"prompt": "größer?", "answer": "ja"})
    task = make_task(f"jsonl:{path}")
    assert sizes_of(task, ByteTokenizer()).prompt == 1 + task.max_prompt_tokens == 10


@pytest.mark.bad_input
@pytest.mark.parametrize("bound", [None, 500])
def test_conversations_without_a_chat_template_are_refused_at_once(tmp_path, bound, tokenizers):
    path = write(tmp_path / "a", *[{"messages": TALK, "answer": "4", "metadata": 0}], *records(60))
    lines = [{"messages": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(60)]
    for task in (make_task(f"jsonl:{write(tmp_path / 'b', *lines)}"), task_of(system="Be brief.")):
        tokenizer = tokenizer_for(task.alphabet)
        words = "messages: expected a model with a chat template .--model.path. .*, got the tok"
        with pytest.raises(ValueError, match=f"^{words}"):
            sizes_of(task, tokenizer, max_prompt_tokens=bound)
        words = "messages: expected a chat template, .*, got none, or --model.no-chat-template"
        with pytest.raises(ValueError, match=f"^{words}"):
            sizes_of(task, tokenizers[1], max_prompt_tokens=bound)
    with pytest.raises(ValueError, match="^messages: expected a model with a chat template"):
        sizes_of(make_task(f"jsonl:{path}"), ByteTokenizer())


@pytest.mark.bad_input
def test_refuses_conversations_that_cannot_be_asked_so(tmp_path):
    system = [{"role": "system", "content": "a"}, TALK[0]]
    lines = [{"messages": [*system[:1], {"role": "user", "content": str(n)}], "answer": "4"} for n in range(60)]
    with pytest.raises(ValueError, match="^--data.system: expected prompts without a system message"):
        task_of(f"jsonl:{write(tmp_path / 'a', *lines)}", system="b").example(0, "train")
    lines = [{"messages": [{"role": "user", "content": str(n)}, TALK[1]], "answer": "4"} for n in range(60)]
    words = "--data.instruction: expected conversations that end with their user, got 'assis"
    with pytest.raises(ValueError, match=f"^{words}"):
        task_of(f"jsonl:{write(tmp_path / 'b', *lines)}", instruction="b").example(0, "train")


class Sums:
    """A data set as reasoning-gym has them."""

    def __getitem__(self, index):
        return {"question": f"What is {index} + 1?", "answer": str(index + 1)}

    def score_answer(self, answer, entry):
        return float(answer == entry["answer"]) or 0.01


def test_sets_of_reasoning_gym_are_asked_through_a_chat_template(tokenizers, monkeypatch):
    """A chat model writes sentences; the data set's own scorer gets the answer in them."""
    factory = types.SimpleNamespace(DATASETS={"sums": (Sums, None)})
    module = types.SimpleNamespace(factory=factory, create_dataset=lambda name, **options: Sums())
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    monkeypatch.setattr("experiments.tasks.reasoning_gym.SCORER_READ", ("sums",))
    data = {"instruction": "Write <answer>…</answer>.", "extract": ("tag",)}
    task = task_of("reasoning_gym:sums", **data)
    tokenizer = tokenizers[0]
    sizes = sizes_of(task, tokenizer, max_new_tokens=20)
    for index in range(20):
        example = task.example(index, "train")
        text = shown(tokenizer, example.prompt)
        assert text == f"<|user|>{example.source['question']}\n\nWrite <answer>…</answer>.<|end|><|model|>"
        assert len(encode_prompt(tokenizer, example, sizes.prompt)) <= sizes.prompt
        assert task.verify(example, f"I add 1. <answer>{example.answer}</answer>") == 1.0
        assert task.verify(example, f"I add 1: {example.answer}") == 0.0


class Eight:
    """A task with eight training prompts, each its own index."""

    def num_examples(self, split):
        return 8

    def example(self, index, split):
        return index


def test_every_pass_has_its_own_order_and_a_cursor_goes_on_in_it():
    taken = PromptStream(Eight(), 0, 3).take(30)
    passes = [taken[:8], taken[8:16], taken[16:]]
    assert [sorted(each) for each in passes] == [list(range(8))] * 3 and len({tuple(each) for each in passes}) == 3
    # Other numbers would change the order of runs that are resumed.
    assert passes[0] == [0, 3, 7, 5, 1, 2, 6, 4] and passes[1] == [3, 7, 4, 2, 1, 6, 5, 0]
    assert PromptStream(Eight(), 7, None).take(8) == [4, 3, 6, 2, 1, 0, 5, 7]
    for cursor in (3, 8, 17):
        resumed = PromptStream(Eight(), 0, 3)
        resumed.cursor = cursor
        assert resumed.take(5) + resumed.take(30) == taken[cursor:] and resumed.take(1) == []
