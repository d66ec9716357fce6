"""Supervised steps here and by the `SFTTrainer` of TRL, from files to the loss of the third step.

Each step has all documents, so that their order does not matter: in rows of several documents here, in four micro-batches
there. Needs the extra parity.

python -m pytest -m parity tests/experiments/test_trl_sft.py
"""

import json

import pytest

from experiments import train
from experiments.config import Config, EvaluationConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from experiments.experience.conversations import load_conversations
from experiments.models.pretrained import open_pretrained
from tests.experiments.test_trl_step import ROUNDING, model_of
from tests.experiments.tiny import train_records
from tests.experiments.tiny_directory import write_tiny_directory

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
transformers = pytest.importorskip("transformers", reason="the extra parity is not installed")
trl = pytest.importorskip("trl", reason="the extra parity is not installed")

MARKED = (
    "{% for message in messages %}{{ '<|' + message['role'].replace('assistant', 'model') + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|model|>' }}{% endif %}"
)
STEPS, DOCUMENTS = 3, 20


def conversation(number):
    turns = f"{number}+{number % 5}?", str(number + number % 5), "sure?", "yes" * (1 + number % 3)
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]}


def completion(number):
    return {"prompt": f"{number}+{number % 5}=", "completion": str(number + number % 5) * (1 + number % 3)}


def write_lines(path, make, tokenizer):
    """Writes as many lines as have `DOCUMENTS` to learn; returns those, and their documents."""
    lines, learnt, documents = [], [], []
    while len(documents) < DOCUMENTS:
        lines.append(make(len(lines)))
        path.write_text(json.dumps(lines[-1]) + "\n")
        found = load_conversations(str(path), tokenizer).documents["train"]
        learnt += lines[-1:] * len(found)
        documents += found
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return learnt, documents


def trainer_of(directory, out, lines, **options):
    """TRL's, on one CPU, at a constant rate from the first step on."""
    from datasets import Dataset

    options |= {"max_grad_norm": 1.0, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "weight_decay": 0.0}
    options |= {"per_device_train_batch_size": DOCUMENTS // 4, "gradient_accumulation_steps": 4}
    options |= {"num_train_epochs": STEPS, "logging_steps": 1, "output_dir": str(out), "save_strategy": "no"}
    here = {"use_cpu": True, "bf16": False, "activation_checkpointing": False, "report_to": [], "disable_tqdm": True}
    return trl.SFTTrainer(
        model=model_of(directory),
        args=trl.SFTConfig(**options, **here),
        processing_class=transformers.AutoTokenizer.from_pretrained(directory),
        train_dataset=Dataset.from_list(lines),
    )


@pytest.mark.parametrize(
    "family, make, chat, options",
    [("qwen3", conversation, True, {"assistant_only_loss": True}), ("llama3", completion, False, {})],
)
def test_supervised_steps_are_those_of_trl(tmp_path, family, make, chat, options):
    directory = write_tiny_directory(tmp_path / "model", family)
    written = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**written, "chat_template": MARKED}))
    path, tokenizer = tmp_path / "lines.jsonl", open_pretrained(directory, chat_template=chat).tokenizer
    lines, documents = write_lines(path, make, tokenizer)
    trainer = trainer_of(directory, tmp_path / "trl", lines, **options)
    theirs = [(row["input_ids"], [label != -100 for label in row["labels"]]) for row in trainer.train_dataset]
    assert theirs == [(document.tokens.tolist(), document.labels.tolist()) for document in documents]
    result = train(
        Config(
            task=f"sft:{path}",
            out=str(tmp_path),
            quiet=True,
            model=ModelConfig(path=str(directory), chat_template=chat),
            schedule=ScheduleConfig(steps=STEPS, docs_per_step=DOCUMENTS, rows=2, row_length=64, epochs=STEPS),
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0, b2=0.999),
            evaluation=EvaluationConfig(every=0, num_prompts=2),
        )
    )
    trainer.train()
    found, wanted = train_records(result), [row for row in trainer.state.log_history if "grad_norm" in row]
    assert len(found) == len(wanted) == STEPS and found[0]["micro_batches"] > 1
    for ours, other in zip(found, wanted, strict=True):
        # Of the first step by rounding; each later one starts from parameters that differ by that of those before.
        for name in ("loss", "grad_norm"):
            assert abs(ours[name] - other[name]) <= ROUNDING * STEPS * abs(other[name]), name
