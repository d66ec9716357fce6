"""The gradient of a step of TRL on a model of transformers, and that of a run here on the same documents.

The documents are packed into rows here, and are rows of one document each there. Needs the extra parity.

python -m pytest -m parity tests/experiments/test_trl_step.py
"""

from types import SimpleNamespace

import numpy as np
import optax
import pytest

from experiments import train
from experiments.config import LossConfig, ModelConfig, RolloutConfig, WarmStartConfig
from experiments.experience.stored import write_documents
from experiments.models.huggingface.export import export
from experiments.models.pretrained import open_pretrained, small_files
from jaxlogp import Document
from tests.experiments.tiny import tiny, train_records
from tests.experiments.tiny_directory import VOCAB, write_tiny_directory
from tests.losses.peer_code import trl_loss

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch", reason="the extra parity is not installed")
transformers = pytest.importorskip("transformers", reason="the extra parity is not installed")
pytest.importorskip("trl", reason="the extra parity is not installed")

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


def their_gradient(directory, texts, old, advantages, options):
    """By names of tensors, after the clip of their global norm, with the loss."""
    model = model_of(directory)
    mask = torch.tensor(np.arange(max(COMPLETIONS)) < np.array(COMPLETIONS)[:, None]).float()
    log_probs, entropy = read_by(model, texts)
    case = SimpleNamespace(mask=mask, old=old, advantages=torch.tensor(advantages), ref=None, entropy=entropy)
    loss = trl_loss(log_probs, case, **options)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.item(), {name: each.grad.numpy() for name, each in model.named_parameters()}


def our_gradient(tmp_path, directory, documents, loss, mesh):
    """The same of a run of one step: the first moment of AdamW is then a tenth of the clipped gradient."""
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
            schedule={"steps": 1, "docs_per_step": len(documents), "rows": 2},
        )
    )
    (record,) = train_records(result)
    assert record["num_documents"] == len(documents) and record["micro_batches"] * 2 < len(documents)
    moment = optax.tree.get(result.setup.learner.state.opt_state, "mu")
    out = tmp_path / "moments"
    export(moment, result.setup.model.decoder, small_files(open_pretrained(directory)), out, "float32")
    return record["loss"], {name: 10 * each for name, each in tensors_of(out).items()}


def tensors_of(directory):
    from safetensors.numpy import load_file

    return load_file(directory / "model.safetensors")


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
    texts, rng = prompts_and_completions(), np.random.default_rng(1)
    advantages = rng.normal(size=len(texts)).astype(np.float32)
    with torch.no_grad():
        now, _ = read_by(model_of(directory), texts)
    # Drawn by an older policy: ratios on both sides of the bounds.
    old = torch.clamp(now + torch.tensor(rng.normal(0.0, 0.3, now.shape), dtype=torch.float32), max=-1e-3)
    documents = [
        Document.of_completion(prompt, completion, row[: len(completion)].numpy(), advantages=float(advantage))
        for (prompt, completion), row, advantage in zip(texts, old, advantages, strict=True)
    ]
    wanted_loss, wanted = their_gradient(directory, texts, old, advantages, options)
    found_loss, found = our_gradient(tmp_path, directory, documents, loss, mesh)
    # A mean of numbers of at most 2 |A|, and of small ones.
    assert abs(found_loss - wanted_loss) <= ROUNDING * 2 * np.abs(advantages).max()
    assert found.keys() == wanted.keys()
    norm = np.sqrt(sum(np.square(each).sum() for each in wanted.values()))
    distance = np.sqrt(sum(np.square(found[name] - each).sum() for name, each in wanted.items()))
    assert distance <= ROUNDING * norm
