"""The gradient of a step of TRL on a model of transformers, and that of a run here on the same documents.

The documents are packed into rows here, and are rows of one document each there. Adapters are those of peft. Needs the
extra parity.

python -m pytest -m parity tests/experiments/test_trl_step.py
"""

from types import SimpleNamespace

import numpy as np
import optax
import pytest
from flax import nnx

from experiments import export as export_command
from experiments import train
from experiments.config import LossConfig, ModelConfig, RolloutConfig, WarmStartConfig
from experiments.experience.stored import write_documents
from experiments.loop.load import load_run
from experiments.models.huggingface.export import export
from experiments.models.lora import ADAPTABLE
from experiments.models.pretrained import open_pretrained, small_files
from jaxlogp import Document
from tests.experiments.tiny import tiny, train_records
from tests.experiments.tiny_directory import VOCAB, write_tiny_directory
from tests.losses.peer_code import trl_loss
from tests.oracle import fp32_bound

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch", reason="the extra parity is not installed")
transformers = pytest.importorskip("transformers", reason="the extra parity is not installed")
pytest.importorskip("trl", reason="the extra parity is not installed")

RANK, ALPHA = 4, 8.0
PROMPTS, COMPLETIONS = (5, 2, 7, 3, 4, 6), (9, 4, 1, 7, 12, 3)
# Each side rounds about 100 products in turn (three layers, forward and backward), of sums of up to 64 terms, to 2^-24 of
# their size; the errors are independent.
ROUNDING = 2 * np.sqrt(100) * 64 * 2.0**-24


def prompts_and_completions():
    """Without id 0, the padding of Gemma 2, whose embedding has no gradient in transformers."""
    rng = np.random.default_rng(0)
    return [(rng.integers(1, VOCAB, p), rng.integers(1, VOCAB, c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]


def model_of(directory):
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **options)


def read_by(model, texts):
    """Log-probs and entropies of every completion, each read alone, in rows that end in padding."""
    rows = []
    for prompt, completion in texts:
        ids = torch.tensor(np.concatenate([prompt, completion]))
        all_log_probs = torch.log_softmax(model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1], dim=-1)
        log_probs = all_log_probs.gather(1, ids[len(prompt) :, None])[:, 0]
        both = torch.stack([log_probs, -(all_log_probs.exp() * all_log_probs).sum(-1)])
        rows.append(torch.nn.functional.pad(both, (0, max(COMPLETIONS) - len(completion))))
    return torch.stack(rows, dim=1)


def drawn_documents(directory):
    """Prompts and completions with log-probs of an older policy, so that ratios lie on both sides of the bounds."""
    texts, rng = prompts_and_completions(), np.random.default_rng(1)
    advantages = rng.normal(size=len(texts)).astype(np.float32)
    with torch.no_grad():
        now, _ = read_by(model_of(directory), texts)
    old = torch.clamp(now + torch.tensor(rng.normal(0.0, 0.3, now.shape), dtype=torch.float32), max=-1e-3)
    documents = [
        Document.of_completion(prompt, completion, row[: len(completion)].numpy(), advantages=float(advantage))
        for (prompt, completion), row, advantage in zip(texts, old, advantages, strict=True)
    ]
    return texts, old, advantages, documents


def their_gradient(model, texts, old, advantages, options):
    """By names of trained tensors, after the clip of their global norm, with the loss."""
    mask = torch.tensor(np.arange(max(COMPLETIONS)) < np.array(COMPLETIONS)[:, None]).float()
    log_probs, entropy = read_by(model, texts)
    case = SimpleNamespace(mask=mask, old=old, advantages=torch.tensor(advantages), ref=None, entropy=entropy)
    loss = trl_loss(log_probs, case, **options)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.item(), {name: each.grad.numpy() for name, each in model.named_parameters() if each.requires_grad}


def our_run(tmp_path, directory, documents, loss, mesh, *, steps=1, **changes):
    """A run whose every step takes all documents."""
    write_documents(path := tmp_path / "documents.safetensors", documents)
    result = train(
        tiny(
            tmp_path,
            "run",
            task="addition:1",
            source=f"stored:{path}",
            model=ModelConfig(path=str(directory), chat_template=False),
            loss=LossConfig(**loss),
            mesh=mesh,
            warm_start=WarmStartConfig(max_steps=0),
            rollout=RolloutConfig(max_prompt_tokens=8, max_new_tokens=12),
            schedule={"steps": steps, "docs_per_step": len(documents), "rows": 2},
            **changes,
        )
    )
    for record in train_records(result):
        assert record["num_documents"] == len(documents) and record["micro_batches"] * 2 < len(documents)
    return result


def first_moment(result):
    return optax.tree.get(result.setup.learner.state.opt_state, "mu")


def our_gradient(tmp_path, directory, documents, loss, mesh):
    """Those of a run of one step, likewise: the first moment of AdamW is then a tenth of the clipped gradient."""
    result = our_run(tmp_path, directory, documents, loss, mesh)
    (record,) = train_records(result)
    out = tmp_path / "moments"
    export(first_moment(result), result.setup.model.decoder, small_files(open_pretrained(directory)), out, "float32")
    return record["loss"], {name: 10 * each for name, each in tensors_of(out).items()}


def tensors_of(directory):
    from safetensors.numpy import load_file

    return load_file(directory / "model.safetensors")


def assert_same_gradient(found, wanted):
    assert found.keys() == wanted.keys()
    norm = np.sqrt(sum(np.square(each).sum() for each in wanted.values()))
    distance = np.sqrt(sum(np.square(found[name] - each).sum() for name, each in wanted.items()))
    assert distance <= ROUNDING * norm


@pytest.mark.parametrize(
    "family, options, loss, mesh",
    [
        ("qwen3", {"loss_type": "dapo", "entropy_coef": 0.05}, {"name": "grpo", "entropy_coefficient": 0.05}, ""),
        ("llama3", {"loss_type": "grpo"}, {"name": "grpo_paper"}, "data=2"),
        (
            "gemma2",
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            {"name": "gspo", "epsilon": 0.2},
            "",
        ),
        ("qwen2", {"loss_type": "dr_grpo"}, {"name": "dr_grpo", "length": 16}, "fsdp=2,tensor=2"),
    ],
)
def test_the_gradient_of_a_step_is_that_of_trl(tmp_path, family, options, loss, mesh):
    directory = write_tiny_directory(tmp_path / "model", family)
    texts, old, advantages, documents = drawn_documents(directory)
    wanted_loss, wanted = their_gradient(model_of(directory), texts, old, advantages, options)
    found_loss, found = our_gradient(tmp_path, directory, documents, loss, mesh)
    # A mean of numbers of at most 2 |A|, and of small ones.
    assert abs(found_loss - wanted_loss) <= ROUNDING * 2 * np.abs(advantages).max()
    assert_same_gradient(found, wanted)


def adapters_by_peft_name(adapters):
    """Adapters, or their gradients, under the names and in the orientation that peft has for them."""
    tensors = {}
    for name, module in nnx.to_pure_dict(adapters)["layers"].items():
        part = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
        for matrix, stacked in (("A", module["lora"]["lora_a"]), ("B", module["lora"]["lora_b"])):
            for layer, values in enumerate(np.asarray(stacked)):
                path = f"base_model.model.model.layers.{layer}.{part}.{name}.lora_{matrix}.default.weight"
                tensors[path] = values.T
    return tensors


def test_the_gradient_and_the_merged_weights_of_adapters_are_those_of_peft(tmp_path):
    """In the second step, which has a B that is not zero, so that A has a gradient too."""
    peft = pytest.importorskip("peft", reason="the extra parity is not installed")
    directory = write_tiny_directory(tmp_path / "model", "qwen3")
    texts, old, advantages, documents = drawn_documents(directory)
    # Without b1, the first moment of AdamW is the clipped gradient of the last step.
    result = our_run(
        *(tmp_path, directory, documents, {"name": "grpo"}, "fsdp=2,tensor=2"),
        steps=2,
        lora={"rank": RANK, "alpha": ALPHA},
        optimizer={"b1": 0.0, "learning_rate": 0.05, "warmup_steps": 0},
        checkpoint={"every": 1},
    )
    after_one = f"{result.run.path}@1"
    adapters = adapters_by_peft_name(load_run(after_one).params)
    options = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(ADAPTABLE), lora_dropout=0.0, bias="none")
    model = peft.get_peft_model(model_of(directory), options)
    unknown = model.load_state_dict({name: torch.tensor(each) for name, each in adapters.items()}, strict=False)
    assert not unknown.unexpected_keys and all(each.any() for each in adapters.values())
    wanted_loss, wanted = their_gradient(model, texts, old, advantages, {"loss_type": "dapo"})
    assert abs(train_records(result)[1]["loss"] - wanted_loss) <= ROUNDING * 2 * np.abs(advantages).max()
    # An adapter is one more product in turn of each projection. The 100 of the bound have room for these: some 60 in all.
    assert_same_gradient(adapters_by_peft_name(first_moment(result)), wanted)

    exported = tensors_of(export_command.main(export_command.ExportConfig(after_one, str(tmp_path / "merged"))))
    base, merged = tensors_of(directory), model.merge_and_unload().state_dict()
    sizes = {}
    for path, a in adapters.items():
        if "lora_A" in path:
            name = path.removeprefix("base_model.model.").replace("lora_A.default.", "")
            product = np.abs(adapters[path.replace("lora_A", "lora_B")]) @ np.abs(a)
            sizes[name] = np.abs(base[name]) + ALPHA / RANK * product
    for name, found in exported.items():
        # Sums of RANK products, scaled, and added to W. Tensors without adapters are as they were.
        bound = fp32_bound(sizes.get(name, 0.0), RANK + 2)
        assert (np.abs(found - merged[name].numpy()) <= bound).all(), name
