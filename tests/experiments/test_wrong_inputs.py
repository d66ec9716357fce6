"""Wrong inputs of every command: one line, an exit code, and no traceback. Refused before anything is compiled."""

import json
import math
import re
import shlex
import subprocess
import sys
import typing

import pytest

from experiments import SamplingOptions, chat, evaluate, export, grpo, plot, resume, train
from experiments.config import Config, OptimizerConfig, ScheduleConfig, apply_changes, validate
from experiments.learner.optimizers import DECAY
from experiments.loop.run import set_up
from experiments.options import AtLeast, OneOf, Positive, Within, flat_fields, option_name, range_of, replaced
from experiments.runs.config_file import save_config
from experiments.runs.folder import RunFolder
from experiments.tasks.arithmetic import Comparison
from tests.experiments.tiny import refusal as refused_by
from tests.experiments.tiny import tiny
from tests.experiments.tiny_directory import write_tiny_directory

COMMANDS = {"grpo": grpo, "evaluate": evaluate, "chat": chat, "export": export, "plot": plot}

DEEP = "[" * 100_000 + "]" * 100_000
LINES = [json.dumps({"prompt": f"{a}{b}=", "answer": str(b)}) for a in range(10) for b in range(10)]
FILES = {
    "good.jsonl": LINES,
    "empty.jsonl": [],
    "broken.jsonl": [LINES[0], '{"prompt": "1"'],
    "long.jsonl": [*LINES, json.dumps({"prompt": "x" * 20_000, "answer": "1"})],
    "words.jsonl": [json.dumps({"prompt": f"{n}=", "answer": "many"}) for n in range(100)],
}
RUNS = {
    "deep-config": ("config.json", DEEP),
    "no-hash": ("config.json", '{"config": {}}'),
    "wrong-hash": ("config.json", '{"config": {}, "sha256": "0"}'),
    "text-config": ("config.json", "not JSON"),
    "garbage-metrics": ("metrics.jsonl", "garbage\n{}\n"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Files and run folders, good and bad; {run} in the table has no checkpoint yet."""
    place = tmp_path_factory.mktemp("inputs")
    for name, lines in FILES.items():
        (place / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    (place / "folder").mkdir()
    (place / "model").mkdir()
    (place / "model" / "config.json").write_text(DEEP)
    (place / "model.gguf").write_bytes(b"GGUF")
    settings = write_tiny_directory(place / "no-template") / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": None}))
    for name in ("run", *RUNS):
        folder = RunFolder.create(place, name)
        save_config(folder.config, tiny(place, name))
        if name in RUNS:
            file, content = RUNS[name]
            (folder.path / file).write_text(content)
    return place


NO_ROOM, NONE = "--rollout.max-new-tokens: expected at least", "expected None for loss"
MOVING = "--loss.kl-coefficient 0.1 --loss.reference-every"
ON_SUPPORT, TARGET = "--loss.on-support True --rollout.top-p 0.5", "--loss.entropy-target 0.2"
GRPO = [
    # The command line itself.
    ("--no-such-option 1", "unrecognized options: --no-such-option, 1"),
    ("--model.dtypo float32", "unrecognized options: --model.dtypo, float32 (perhaps --model.dtype); --help lists all"),
    ("--steps 3", "unrecognized options: --steps, 3 (perhaps --schedule.steps); --help lists all"),
    ("--rollout.n 3", "unrecognized options: --rollout.n, 3 (perhaps --rollout.num-generations); --help lists all"),
    ("--loss gspo", "unrecognized options: --loss, gspo (perhaps --loss.name); --help lists all"),
    ("extra", "unrecognized options: extra"),
    ("--task", "missing value for argument '--task'"),
    ("--seed", "missing value for argument '--seed'"),
    ("--seed one", "error parsing --seed: invalid literal"),
    ("--optimizer.learning-rate fast", "error parsing --optimizer.learning-rate"),
    ("--quiet perhaps", "unrecognized options: perhaps"),
    ("--preset gpt5", "--preset: expected one of smollm2, got 'gpt5'"),
    # Names and places.
    ("--name ''", "--name: expected the name of a folder, got ''"),
    ("--name ' '", "--name: expected the name of a folder, got ' '"),
    ("--name a/b", "--name: expected the name of a folder, got 'a/b'"),
    ("--name ..", "--name: expected the name of a folder, got '..'"),
    (r"--name 'a\b'", "--name: expected the name of a folder"),
    ("--name $'a\\nb'", "--name: expected the name of a folder"),
    ("--name " + "x" * 300, "--name: expected at most 200 bytes, got 300"),
    ("--name " + "é" * 150, "--name: expected at most 200 bytes, got 300"),
    ("--name run --out {place}", "run folder: expected a path that does not exist yet, got {place}/run"),
    ("--out {place}/good.jsonl", "--out: expected a folder, or where one can be made, got {place}/good.jsonl"),
    ("--out {place}/good.jsonl/deeper", "--out: expected a folder, or where one can be made, got {place}/good.jsonl"),
    ("--out /proc/nothing", "--out: expected a folder, or where one can be made, got /proc, where none can be made"),
    ("--out " + "x" * 5000, "--out: expected a path that can be made, got xxx"),
    # Numbers.
    ("--schedule.row-length 4", "--schedule.row-length: expected at least 11, the longest document of this task, got 4"),
    ("--rollout.top-k 0", "--rollout.top-k: expected an integer of at least 1, or None, got 0"),
    ("--rollout.top-p 0", "--rollout.top-p: expected a number above 0, at most 1"),
    ("--rollout.min-p 2", "--rollout.min-p: expected a number in [0, 1]"),
    ("--rollout.stop ''", "--rollout.stop: expected a tuple of texts of at least one character"),
    ("--rollout.max-prompt-tokens 2", "--rollout.max-prompt-tokens: expected at least 7, for the prompts of this task"),
    # Options under which no answer fits.
    *(
        (f"--task {task} --rollout.max-new-tokens {room}", f"{NO_ROOM} {least}, for the shortest answer, got {room}")
        for task, room, least in (
            ("addition:1 --rollout.mask-truncated", 1, 2),
            ("jsonl:{place}/words.jsonl", 3, 4),
            ("jsonl:{place}/words.jsonl --data.instruction Write. --data.extract tag whole", 3, 4),
            ("jsonl:{place}/words.jsonl --rollout.mask-truncated", 4, 5),
        )
    ),
    # More memory than any machine has.
    *(
        (f"{options} --quiet", "memory: parameters, optimizer state, gradients and the sampler's cache need at least ")
        for options in (
            "--model.hidden-size 2000000000",
            "--rollout.prompts-per-rollout 1000000000",
            "--task jsonl:{place}/long.jsonl --data.max-text-bytes 99999 --rollout.prompts-per-rollout 99999",
        )
    ),
    ("--optimizer.momentum 0.9", "--optimizer.momentum: expected no value for optimizer 'adamw'"),
    ("--optimizer.name adafactor --optimizer.b1 0.9", "--optimizer.b1: expected no value for optimizer 'adafactor'"),
    ("--optimizer.first-moment-dtype bfloat16 --optimizer.b1 0.99", "--optimizer.b1: expected at most 0.98 with "),
    (
        "--optimizer.name adafactor --optimizer.first-moment-dtype bfloat16",
        "--optimizer.first-moment-dtype: expected float32 for adafactor",
    ),
    (
        "--optimizer.weight-decay 1e9",
        "--optimizer.weight-decay: expected at most 2000, which is 1 / --optimizer.learning-rate",
    ),
    ("--optimizer.final-rate 0.1", "--optimizer.final-rate: expected None for schedule 'constant'"),
    # Losses.
    ("--loss.name ppo", "--loss.name: expected one of cispo, "),
    (
        "--schedule.epochs-per-rollout 2 --schedule.docs-per-step 0",
        "--schedule.docs-per-step: expected at least 1 with --schedule.epochs-per-rollout, got 0",
    ),
    (
        "--loss.name gdpo --reward.kl-coefficient 0.1",
        "--loss.advantages: expected none of the reward's parts with --reward.kl-coefficient, which is subtracted from",
    ),
    (
        "--loss.name reinforce_pp --rollout.resample-degenerate",
        "--loss.advantages: expected none over a whole rollout with --rollout.resample-degenerate, ",
    ),
    ("--loss.max-weight 5", "--loss.max-weight: expected None for loss 'grpo', which has no such option, got 5.0"),
    ("--loss.name dppo_tv --loss.ratio sequence", "--loss.ratio: expected 'token' for DivergenceMask, which reads"),
    ("--loss.weighting length", "--loss.weighting: expected None for loss 'grpo', which has no such option"),
    ("--loss.epsilon 1.5", "--loss.epsilon: expected a number in (0, 1), got 1.5"),
    ("--loss.epsilon nan", "--loss.epsilon: expected a number in (0, 1), got nan"),
    ("--loss.length 5", "--loss.length: expected None for loss 'grpo' without --loss.reduction constant_length, got 5"),
    (
        "--loss.name dr_grpo --loss.length 5 --loss.reduction labels",
        "--loss.length: expected None for loss 'dr_grpo' without --loss.reduction constant_length, got 5",
    ),
    ("--loss.reduction mean", "--loss.reduction: expected "),
    ("--loss.kl-coefficient -1", "--loss.kl-coefficient: expected "),
    ("--loss.kl-estimator k9 --loss.kl-coefficient 0.1", "--loss.kl-estimator: expected "),
    ("--loss.advantages none", "--loss.advantages: expected others for a loss that has no KL and no entropy bonus"),
    ("--loss.kl-estimator k1", "--loss.kl-estimator: expected None without --loss.kl-coefficient, got k1"),
    ("--loss.kl-unbiased True", "--loss.kl-unbiased: expected None without --loss.kl-coefficient, got True"),
    ("--loss.gradient-filter 1", "--loss.gradient-filter: expected None or a number in [0, 1), got 1.0"),
    ("--loss.gradient-filter -0.1", "--loss.gradient-filter: expected None or a number in [0, 1), got -0.1"),
    ("--loss.gradient-filter nan", "--loss.gradient-filter: expected None or a number in [0, 1), got nan"),
    ("--loss.vocab-tile 0 --loss.engine chunked", "--loss.vocab-tile: expected an integer > 0, got 0"),
    ("--loss.token-chunk 64", "--loss.token-chunk: expected None with --loss.engine auto (chunked has blocks"),
    ("--loss.support-room 8", "--loss.support-room: expected 128 without --loss.on-support, got 8"),
    ("--loss.on-support True", "--loss.on-support: expected no value without --rollout.top-k"),
    (f"{ON_SUPPORT} --loss.engine chunked", "--loss.engine: expected auto with --loss.on-support"),
    (f"{ON_SUPPORT} --loss.gradient-filter 0.1", "--loss.gradient-filter: expected None with --loss.on-support"),
    ("--loss.top-entropy 0", "--loss.top-entropy: expected a number in (0, 1], got 0.0"),
    ("--loss.top-entropy nan", "--loss.top-entropy: expected a number in (0, 1], got nan"),
    (
        "--loss.name gspo --loss.top-entropy 0.2",
        f"--loss.top-entropy: {NONE} 'gspo': an advantage of 0 would change the mean of its whole document, got 0.2",
    ),
    (
        "--loss.name kl_cov --loss.top-entropy 0.2",
        f"--loss.top-entropy: {NONE} 'kl_cov', which chooses labels by their covariance, got 0.2",
    ),
    ("--loss.cov-share 0.1", f"--loss.cov-share: {NONE} 'grpo', which has no such option, got 0.1"),
    ("--loss.name kl_cov --loss.cov-low 0.1", f"--loss.cov-low: {NONE} 'kl_cov', which has no such option, got 0.1"),
    (
        "--loss.name clip_cov --loss.drift-coefficient 0.1",
        f"--loss.drift-coefficient: {NONE} 'clip_cov', which has no such option, got 0.1",
    ),
    ("--loss.name kl_cov --loss.epsilon 0.1", f"--loss.epsilon: {NONE} 'kl_cov', which has no such option"),
    ("--loss.name clip_cov --loss.cov-share 1.5", "--loss.cov-share: expected a number in (0, 1], got 1.5"),
    ("--loss.name clip_cov --loss.cov-high 0.5", "--loss.cov-low: expected a number below cov_high = 0.5, got 1.0"),
    (
        "--loss.name kl_cov --loss.drift-coefficient -1",
        "--loss.drift-coefficient: expected a finite number of at least 0",
    ),
    ("--loss.entropy-step 0.1", "--loss.entropy-step: expected None without --loss.entropy-target, got 0.1"),
    ("--loss.entropy-maximum 0.1", "--loss.entropy-maximum: expected None without --loss.entropy-target, got 0.1"),
    ("--loss.reference-share 0.5", "--loss.reference-share: expected None without --loss.reference-every, got 0.5"),
    (f"{MOVING} 0", "--loss.reference-every: expected a number of updates >= 1, got 0"),
    (f"{MOVING} 1 --loss.reference-share 0", "--loss.reference-share: expected a number in (0, 1], got 0.0"),
    (f"{MOVING} 1 --loss.reference-share 1.5", "--loss.reference-share: expected a number in (0, 1], got 1.5"),
    (f"{MOVING} 1 --loss.reference-share nan", "--loss.reference-share: expected a number in (0, 1], got nan"),
    (
        "--loss.reference-every 4",
        "--loss.reference-every: expected None without --loss.kl-coefficient or --reward.kl-coefficient, got 4",
    ),
    ("--loss.entropy-target -0.1", "--loss.entropy-target: expected a finite number of at least 0, got -0.1"),
    ("--loss.entropy-target inf", "--loss.entropy-target: expected a finite number of at least 0, got inf"),
    (f"{TARGET} --loss.entropy-step 0", "--loss.entropy-step: expected a finite number > 0, got 0.0"),
    (f"{TARGET} --loss.entropy-step inf", "--loss.entropy-step: expected a finite number > 0, got inf"),
    (f"{TARGET} --loss.entropy-maximum -1", "--loss.entropy-maximum: expected a finite number > 0"),
    (
        f"{TARGET} --loss.entropy-coefficient 1.5",
        "--loss.entropy-coefficient: expected a coefficient in [0, 1.0] with an entropy target, got 1.5",
    ),
    (
        f"{TARGET} --loss.metrics basic",
        "--loss.metrics: expected with_entropy along with --loss.entropy-target, which reads the entropy of each step, "
        "got basic",
    ),
    ("--loss.ratio document", "--loss.ratio: expected one of ('token', 'sequence', 'sequence_token', 'product')"),
    ("--loss.gradient-filter small", "error parsing --loss.gradient-filter"),
    (
        "--loss.gradient-filter 0 --loss.engine triton",
        "--loss.gradient-filter: expected None with --loss.engine triton (hopper and chunked have a filter), got 0.0",
    ),
    # Models.
    ("--model.head-dim 15", "--model.head-dim: expected an even number, got 15"),
    ("--model.name gpt2", "--model.name: expected one of qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, llama-3.2-1b"),
    ("--model.name qwen3-0.6b --model.num-layers 2", "--model.num-layers: expected no value together with --model.name"),
    ("--model.path /nowhere/at/all", "--model.path: expected "),
    ("--model.path {place}/folder", "config.json"),
    ("--model.path {place}/model", "config.json: expected JSON"),
    ("--model.path {place}/model.gguf", "GGUF"),
    ("--model.path package:a.b", "--model.path: expected package:NAME with the name of a package, got 'package:a.b'"),
    ("--model.no-chat-template", "--model.no-chat-template: expected no value without --model.path"),
    ("--lora.rank 4", "--lora.rank: expected 0 for a model that is not from disk (--model.path)"),
    ("--lora.alpha 8", "--lora: expected no other options without --lora.rank, which is 0"),
    # Meshes and modes.
    ("--mesh model=2", "--mesh: expected axes named data or fsdp or sequence or tensor, got 'model' in 'model=2'"),
    ("--mesh data=64", "--mesh: expected 64 devices for data=64,fsdp=1,sequence=1,tensor=1, got 8 cpu devices"),
    ("--rollout.mesh data=64", "--rollout.mesh: expected 64 devices for data=64,fsdp=1,sequence=1,tensor=1, got 8 cpu"),
    ("--rollout.mesh model=2", "--rollout.mesh: expected axes named data or fsdp or sequence or tensor"),
    ("--mesh sequence=8", "--mesh: expected sequence times tensor ranks that divide the 4 key-value heads, got 8"),
    ("--mesh sequence=2 --schedule.row-length 33", "--schedule.row-length: expected a number that 2 sequence ranks divide"),
    ("--rollout.mesh sequence=2", "--rollout.mesh: expected no sequence ranks, since a rollout has one token of a row"),
    ("--mesh sequence=2 --invariant", "--mesh: expected no sequence ranks with --invariant, whose leaves are whole rows"),
    (
        "--invariant --invariance.leaf-rows 8 --schedule.rows 16",
        "--schedule.rows: expected None or 8 with --invariant, whose micro-batches are",
    ),
    ("--invariant --rollout.rows 4", "--rollout.rows: expected None with --invariant, which draws as many rows as a leaf"),
    ("--invariant --rollout.int8-weights", "--rollout.int8-weights: expected no value with --invariant, whose sampler"),
    ("--invariant --schedule.accumulate bfloat16", "--schedule.accumulate: expected float32 with --invariant, got bfloat16"),
    ("--model.attention cudnn", "--model.attention: expected an implementation that can run here, got "),
    ("--invariant --model.attention chunked", "--model.attention: expected auto, repeatable or"),
    ("--invariant --loss.engine chunked", "--loss.engine: expected auto with --invariant"),
    ("--invariant --loss.gradient-filter 0", "--loss.gradient-filter: expected None with --invariant"),
    ("--invariance.leaf-rows 4", "--invariance: expected no other options without --invariant"),
    ("--correction.level word", "--correction.level: expected one of ('token', 'sequence', 'geometric'), got 'word'"),
    ("--correction.level token --correction.high 0.5", "--correction.high: expected a number of at least 1, got 0.5"),
    ("--rejection.veto 2", "--rejection.veto: expected a number in (0, 1], got 2.0"),
    ("--rejection.token 2 3", "--rejection.token[0]: expected a number in [0, 1], got 2.0"),
    ("--rejection.k3 1 --rollout.rescore False", "--rollout.rescore: expected None or True with --correction or"),
    # Options that would do nothing.
    ("--correction.high 3", "--correction: expected no other options without --correction.level"),
    ("--rejection.keep-denominator", "--rejection.keep-denominator: expected no value without a rule of --rejection"),
    ("--rollout.max-resamples 5", "--rollout.max-resamples: expected no value without --rollout.resample-degenerate, got 5"),
    ("--reward.length 5", "--reward.length: expected no value without the reward overlong or short, got 5"),
    ("--reward.kl-estimator k3", "--reward.kl-estimator: expected no value without --reward.kl-coefficient, got k3"),
    ("--reward.pattern x", "--reward.pattern: expected no value without the reward pattern, got x"),
    ("--data.answer-key solution", "--data.answer-key: expected no value with a task other than jsonl:PATH, got solution"),
    ("--task sft:{place}/good.jsonl --data.system Hello", "--data: expected no options in supervised learning"),
    ("--model.path {place}/model --warm-start.target 0.9", "--warm-start: expected no options without --warm-start.max-st"),
    # Tasks, sources and rewards.
    ("--source module", "--source: expected module:name of a function"),
    ("--source ''", "--source: expected module:name of a function"),
    ("--task subtraction", "--task: expected one of addition[:SIZE], "),
    ("--task addition:0", "task 'addition:0': expected a size from 1 to 64 after the colon, got '0'"),
    ("--schedule.epochs 1", "--schedule.epochs: expected None, or a task with a finite number of training prompts"),
    ("--reward.functions kindness", "--reward.functions: expected some of correct, tags, pattern, ended, short, overlong"),
    ("--reward.weights 1 2", "--reward.weights: expected 1 weights, one per function, got 2"),
    ("--reward.weights inf", "--reward: expected a finite weight for 'correct', got inf"),
    ("--reward.functions tags tags", "--reward: expected functions of different names, got tags, tags"),
    ("--reward.functions", "--reward: expected at least one function, got none"),
    ("--reward.functions pattern", "--reward.pattern: expected a regular expression for the reward pattern, got None"),
    ("--reward.functions pattern --reward.pattern '('", "--reward.pattern: expected a regular expression"),
    (
        "--reward.functions overlong --reward.length 9 --reward.buffer 10",
        "--reward.buffer: expected a number of tokens in [1, 9] for the reward overlong, got 10",
    ),
    ("--reward.functions short", "--reward.length: expected at least 1 token for the reward short, got None"),
    ("--data.extract nothing", "--data.extract: expected "),
    ("--data.system Hello", "chat template"),
    ("--data.instruction Add.", r"=\n\nAdd.': text: expected characters of '0123456789+=', got '\n' at "),
    # Files of examples; what is wrong in their lines is in test_jsonl.py.
    ("--task jsonl:{place}/empty.jsonl", "expected one JSON object a line, got an empty file"),
    ("--task jsonl:{place}/broken.jsonl", "line 2: invalid JSON"),
    ("--task jsonl:/nowhere/at/all.jsonl", "file /nowhere/at/all.jsonl: expected a readable file, got No such file"),
    ("--task jsonl:{place}/folder", "file {place}/folder: expected a readable file, got Is a directory"),
    ("--task jsonl:{place}/good.jsonl --data.verifier fuzzy", "--data.verifier: expected one of exact, numeric"),
    ("--task jsonl:{place}/good.jsonl --data.answer-pattern '('", "--data.answer-pattern: expected a regular expression"),
    ("--task jsonl:{place}/good.jsonl --data.max-text-bytes 0", "--data.max-text-bytes: expected at least 1, got 0"),
    ("--task jsonl:{place}/words.jsonl --data.verifier numeric", "line 1: 'answer' must hold exactly one number"),
    # Resuming. {place}/run began with the options of tests/experiments/tiny.py.
    ("--resume /nowhere/at/all", "run folder: expected an existing folder, got /nowhere/at/all"),
    ("--resume ''", "run folder: expected "),
    ("--resume {place}/good.jsonl", "run folder: expected an existing folder"),
    ("--resume {place}/folder", "run folder: expected one with config.json and env.json"),
    ("--resume {place}/run --task addition", "--task: the run has comparison:1, given addition:2"),
    ("--resume {place}/run --name other", "--name: the run has run, given other"),
    ("--resume {place}/run --out elsewhere", "--out: the run has {place}, given elsewhere"),
    ("--resume {place}/run --preset smollm2", "--preset: the run has None, given smollm2"),
    (
        "--resume {place}/run --loss.name gspo --seed 0 --rollout.num-generations 8 --schedule.steps 9",
        "--loss.name: the run has grpo, given gspo; --rollout.num-generations: the run has 4, given 8",
    ),
    ("--resume {place}/run --schedule.steps -1", "--schedule.steps: expected at least 0, got -1"),
    ("--resume {place}/run --mesh data=64", "--mesh: expected 64 devices"),
    ("--resume {place}/deep-config", "config.json: expected a JSON object, got ValueError: JSON: expected values nested"),
    ("--resume {place}/no-hash", "config.json: expected the keys config and sha256, got ['config']"),
    ("--resume {place}/wrong-hash", "edited or damaged"),
    ("--resume {place}/text-config", "config.json: expected a JSON object, got JSONDecodeError"),
]  # fmt: skip

OTHERS = [
    ("evaluate", "", "run: expected a run folder, or --model, got neither"),
    ("evaluate", "/nowhere/at/all", "run folder: expected an existing folder"),
    ("evaluate", "{place}/folder", "run folder: expected one with config.json and env.json"),
    ("evaluate", "{place}/run", "checkpoints: expected at least one complete step in {place}/run/checkpoints, got none"),
    ("evaluate", "{place}/run --task addition", "--task: expected no value together with a run, which has its own"),
    ("evaluate", "{place}/run --model x", "--model: expected no value together with a run, which has its own"),
    ("evaluate", "{place}/run --no-chat-template", "--no-chat-template: expected no value together with a run"),
    ("evaluate", "{place}/run --data.system x", "--data: expected no value together with a run"),
    ("evaluate", "--model /nowhere/at/all", "--model: expected "),
    ("evaluate", "--model {place}/no-template", "expected a chat template (or --no-chat-template, for prompts as they are)"),
    ("evaluate", "--model x --num-prompts 0", "--num-prompts: expected at least 1, got 0"),
    ("evaluate", "--model x --max-new-tokens 0", "--max-new-tokens: expected at least 1, got 0"),
    (
        "evaluate",
        "--model x --task sft:x --max-new-tokens 5",
        "--max-new-tokens: expected no value in supervised learning, which samples nothing, got 5",
    ),
    ("evaluate", "--model x --samples 0", "--samples: expected at least 1, got 0"),
    ("evaluate", "--model x --task sft:x --samples 2", "--samples: expected no value in supervised learning, which samples"),
    ("chat", "/nowhere/at/all", "model: expected a run folder, a directory or a GGUF file, got /nowhere/at/all"),
    ("chat", "{place}/folder", "config.json"),
    ("chat", "{place}/run --dtype float64", "--dtype: expected float32 or bfloat16, got float64"),
    ("chat", "{place}/run --dtype bfloat16", "--dtype: expected no value together with a run, which has its own"),
    ("chat", "{place}/run --seed -1", "--seed: expected a number of at least 0, below 2^31, got -1"),
    ("chat", "{place}/run --seed 99999999999999999999", "--seed: expected a number of at least 0, below 2^31"),
    ("chat", "{place}/run --max-new-tokens 0", "--max-new-tokens: expected at least 1"),
    ("chat", "{place}/run --temperature -1", "--temperature: expected "),
    ("chat", "{place}/run", "checkpoints: expected at least one complete step"),
    ("chat", "", "missing from python -m experiments.chat: STR Run folder"),
    ("export", "{place}/run {place}/folder", "out: expected a directory that does not exist yet, got {place}/folder"),
    ("export", "{place}/run {place}/new --dtype int8", "--dtype: expected float32 or bfloat16, got int8"),
    ("export", "{place}/run {place}/new", "checkpoints: expected at least one complete step"),
    ("plot", "/nowhere/at/all", "run folder: expected an existing folder"),
    ("plot", "{place}/run", "run: expected one with optimizer steps"),
    ("plot", "{place}/run --figure /nowhere/a.png", "--figure: expected a file in an existing folder, got /nowhere/a.png"),
    ("plot", "{place}/run --figure ''", "--figure: expected a file in an existing folder, got ."),
    ("plot", "{place}/run --figure {place}/folder", "--figure: expected a file in an existing folder, got {place}/folder"),
    ("plot", "{place}/run --figure {place}/a.pdf", "--figure: expected a PNG file, named .png, got {place}/a.pdf"),
    ("plot", "{place}/garbage-metrics", "metrics.jsonl line 1: expected a JSON object"),
]  # fmt: skip

RANGES = {name: found for name, hint in flat_fields(Config).items() if (found := range_of(hint)) is not None}
BY_OBJECTS = {
    *("rollout.top_k", "rollout.top_p", "rollout.min_p", "data.max_text_bytes", "reward.length", "reward.buffer"),
    *("model.hidden_size", "model.intermediate_size", "model.num_layers"),
    *("model.num_heads", "model.num_kv_heads", "model.head_dim"),
}
"""Numbers that are compared by what is made of them, as those of the sections loss, correction and rejection are."""


def kind_of(name):
    """The type of an option of one number or text, else None."""
    hint = flat_fields(Config)[name]
    bare = typing.get_args(hint)[0] if range_of(hint) else hint
    inner = () if typing.get_origin(bare) is tuple else typing.get_args(bare)
    return next((kind for kind in (int, float, str) if kind in (bare, *inner)), None)


def words_of(arguments, place):
    return [each.replace("{place}", str(place)) for each in shlex.split(arguments.replace("$'a\\nb'", "'a\nb'"))]


# The command line gives a meaning to the first, and their whole names to the others.
OF_THE_COMMAND_LINE = ("preset", "mesh", "model")


def values_of(given):
    """Values by field if a new run is given single numbers and texts alone, else None."""
    names = [option.removeprefix("--").replace("-", "_") for option in given[::2]]
    known = {name for name in flat_fields(Config) if name.partition(".")[0] not in OF_THE_COMMAND_LINE}
    if len(given) % 2 or not all(name in known and kind_of(name) for name in names):
        return None
    try:
        return {name: kind_of(name)(value) for name, value in zip(names, given[1::2], strict=True)}
    except ValueError:
        return None


FROM_PYTHON = [row for row in GRPO if values_of(words_of(row[0], "")) is not None]
TABLE = [*(("grpo", *row) for row in GRPO if row not in FROM_PYTHON), *OTHERS]


@pytest.mark.bad_input
@pytest.mark.parametrize(("arguments", "words"), FROM_PYTHON)
def test_a_run_is_refused_with_a_sentence_and_leaves_no_folder(arguments, words, place, tmp_path, monkeypatch):
    """Without the command line, whose parser takes most of the time; what it makes of a ValueError is tested below."""
    monkeypatch.chdir(tmp_path)
    config = replaced(Config(), values_of(words_of(arguments, place)))
    with pytest.raises(ValueError) as refused:
        set_up(config)
    assert words.replace("{place}", str(place)) in " ".join(str(refused.value).split())
    assert not list(tmp_path.iterdir())


@pytest.mark.bad_input
@pytest.mark.parametrize(("command", "arguments", "words"), TABLE)
def test_one_line_and_exit_code_2(command, arguments, words, place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words.replace("{place}", str(place)) in refused_by(capsys, COMMANDS[command], words_of(arguments, place))
    assert not list(tmp_path.iterdir()), "a refused run leaves no folder"


def refusal(name, value):
    with pytest.raises(ValueError) as refused:
        validate(replaced(Config(), {name: value}))
    return str(refused.value)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", RANGES)
def test_every_range_is_compared(name):
    probes = {int: (-1, 0, 1), float: (-1.0, 0.0, 2.0), str: ("none of them",)}[kind_of(name)]
    wrong = [value for value in probes if not RANGES[name].allows(value)]
    assert wrong
    for value in wrong:
        assert refusal(name, value) == f"{option_name(name)}: expected {RANGES[name].expected}, got {value}"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "expected"),
    [
        (AtLeast(2), (2, 3, 2**40), (1, -2), "at least 2"),
        (Within(0.01, 1.0), (0.01, 0.5, 1.0), (0.0, 1.001, -1.0), "a number in [0.01, 1.0]"),
        (Positive(), (1e-300, 7.0), (0.0, -1.0, math.inf, math.nan), "a finite number > 0"),
        (DECAY, (0.0, 0.5, 1 - 2**-24), (-0.1, 1 - 2**-25, 1.0), "a decay in [0, 1), in fp32 too"),
        (OneOf("a", "b"), ("a", "b"), ("", "ab", "c"), "one of a, b"),
    ],
)
def test_ranges(allowed, inside, outside, expected):
    assert all(map(allowed.allows, inside)) and not any(map(allowed.allows, outside)) and allowed.expected == expected


@pytest.mark.bad_input
@pytest.mark.parametrize("name", [name for name in flat_fields(Config) if kind_of(name)])
def test_every_number_has_a_range_and_every_value_can_be_stored(name):
    section, kind = name.partition(".")[0], kind_of(name)
    assert kind is str or (name in RANGES) != (name in BY_OBJECTS or section in ("loss", "correction", "rejection"))
    if kind is int:
        expected, wrong = "a number below 2^31", (2**31, -(2**31))
    elif kind is float:
        # Some losses have open ranges, and sentences of their own.
        expected, wrong = "a finite number", () if section == "loss" else (math.nan, math.inf)
    else:
        expected, wrong = "text without a null character", ("a\0b",)
    for value in wrong:
        shown = repr(value) if kind is str else value
        assert refusal(name, value) == f"{option_name(name)}: expected {expected}, got {shown}"


@pytest.mark.bad_input
def test_the_table_is_long():
    assert len(TABLE) >= 80 and len({(command, arguments) for command, arguments, _ in TABLE}) == len(TABLE)
    assert len(FROM_PYTHON) >= 60 and len({arguments for arguments, _ in FROM_PYTHON}) == len(FROM_PYTHON)


@pytest.mark.slow
@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_a_process_of_its_own(debug, cheap_processes):
    command = [sys.executable, "-m", "experiments.grpo", "--seed", "-1", *debug]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "error: --seed: expected at least 0, got -1" in done.stderr, done.stderr
    assert ("Traceback" in done.stderr) == bool(debug)


def with_options(**options):
    return lambda out: train(Config(out=str(out), **options))


class Task:
    name = "task without examples"


SOURCE = "source: expected a function (policy, step) -> documents, or an object with next, state and restore, got "
PASSED = {
    "config: expected an experiments.Config, got str 'grpo'": lambda out: train("grpo"),
    "config.seed: expected int, got '3'": with_options(seed="3"),
    "config.schedule.steps: expected int, got 1.5": with_options(schedule=ScheduleConfig(steps=1.5)),
    "config.rollout: expected every key of RolloutConfig": with_options(rollout={"num_generations": 4}),
    "config.optimizer.learning_rate: expected float, got '1'": with_options(
        optimizer=OptimizerConfig(learning_rate="1")
    ),
    "preset: expected one of smollm2, got 'smol'": with_options(preset="smol"),
    "preset: expected experiments.presets.PRESETS[name], ": with_options(preset="smollm2", seed=3),
    "task: expected an object with name, alphabet, ": lambda out: train(Config(out=str(out)), task=Task()),
    "--task: expected no task of your own where train is given one, and no file to learn from, got sft:a.jsonl": (
        lambda out: train(Config(out=str(out), task="sft:a.jsonl"), task=Comparison(1))
    ),
    "task: expected none of your own with --model (--task module:name), got Comparison": (
        lambda out: evaluate.main(evaluate.EvaluateConfig(model=str(out)), Comparison(1))
    ),
    f"{SOURCE}int 5": lambda out: train(Config(out=str(out)), source=5),
    f"{SOURCE}type <class 'int'>": lambda out: train(Config(out=str(out)), source=int),
    "max_new_tokens: expected an integer of at least 1, got 3.5": lambda out: SamplingOptions(3.5),
    "top_k: expected an integer of at least 1, or None, got '5'": lambda out: SamplingOptions(4, top_k="5"),
    "top_p: expected a number above 0, at most 1, got '1'": lambda out: SamplingOptions(4, top_p="1"),
    "stop: expected a tuple of texts of at least one character, got 'end'": lambda out: SamplingOptions(4, stop="end"),
    "changes.schedule.steps: expected int, got '5'": lambda out: apply_changes(Config(), {"schedule.steps": "5"}),
    "run folder: expected a path, got NoneType None": lambda out: resume(None),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("words", PASSED)
def test_what_is_passed_from_python_is_named(tmp_path, words):
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        PASSED[words](tmp_path)
    assert not list(tmp_path.iterdir())
