"""A training step of transformers, with Liger's kernels where they are installed, as a row of `benchmarks.step_speed`.

    python -m benchmarks.step_speed.transformers_step '{"model": "qwen3-0.6b", "checkpointing": true}'

It runs in a process of its own, with PyTorch alone, and prints one line of JSON: neither framework's memory is in the
other's way. A step includes the update: AdamW over bf16 parameters with bf16 state, after gradient clipping. Attention is
sdpa over rows that are one document each, so that no mask is needed. The loss is the cross-entropy of the next token,
through Liger's fused linear cross entropy, or from stored logits where Liger is not installed; Liger also replaces norms,
SwiGLU and rotation. All of that is as its users have it, and less than our step does (fp32 optimizer state, packed
documents, a policy loss with its metrics).
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from experiments.models.decoder_config import DecoderConfig
from experiments.models.huggingface.config import config_json
from experiments.models.named_shapes import NAMED_SHAPES

LIGER = "liger_kernel"


@dataclass(frozen=True)
class TransformersConfig:
    """Options of one measurement."""

    model: str = "qwen3-0.6b"
    """A name of experiments.models.named_shapes."""
    rows: str = "16x2048"
    """Rows by tokens of a row."""
    micro_batches: int = 1
    """Micro-batches of a step."""
    layers: int | None = None
    """Layers instead of the model's."""
    checkpointing: bool = False
    """Gradient checkpointing: keep the layers' inputs alone."""
    repeats: int = 5
    """Timed steps; the median counts."""


@dataclass(frozen=True)
class Peer:
    """A measurement, or `why_not`, a few words, where there is none."""

    why_not: str | None = None
    program: str = "transformers"
    head: str = "Liger"
    milliseconds: float = 0.0
    peak_gib: float = 0.0
    num_parameters: int = 0


def measured_elsewhere(config: TransformersConfig) -> Peer:
    """Runs a measurement in a process of its own."""
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            return Peer(why_not=f"{module} is not installed")
    command = [sys.executable, "-m", "benchmarks.step_speed.transformers_step", json.dumps(dataclasses.asdict(config))]
    # JAX is imported for the shapes alone.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return Peer(why_not=f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:300]}")
    return Peer(**json.loads(done.stdout.splitlines()[-1]))


class TransformersStep:
    """A step of a model of random weights.

    Args:
        shape: sizes and options of the model.
        rows: rows of a step.
        length: tokens of a row.
        device: "cuda", or "cpu" to try it.
        liger: whether to use Liger's kernels.
        checkpointing: whether only the layers' inputs are kept.
        micro_batches: how many the step is cut into.
    """

    def __init__(
        self,
        shape: DecoderConfig,
        rows: int,
        length: int,
        *,
        device: str,
        liger: bool,
        checkpointing: bool = False,
        micro_batches: int = 1,
    ) -> None:
        import torch
        import transformers

        described = config_json(shape)
        config = transformers.AutoConfig.for_model(described.pop("model_type"), **described)
        torch.manual_seed(0)
        options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
        with torch.device(device):
            self.model = transformers.AutoModelForCausalLM.from_config(config, **options).train()
            self.tokens = torch.randint(shape.vocab_size, (rows, length)).chunk(micro_batches)
        if liger:
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=self.model)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.num_parameters = sum(each.numel() for each in self.model.parameters())
        self._clip = torch.nn.utils.clip_grad_norm_
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    def __call__(self) -> Any:
        """One step; returns the loss of the last micro-batch."""
        for tokens in self.tokens:
            loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / len(self.tokens)).backward()
        self._clip(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def measure(config: TransformersConfig) -> Peer:
    """Times a step on the GPU."""
    import torch

    if not torch.cuda.is_available():
        return Peer(why_not="it needs an NVIDIA GPU")
    liger = importlib.util.find_spec(LIGER) is not None
    shape = NAMED_SHAPES[config.model]
    shape = shape if config.layers is None else dataclasses.replace(shape, num_layers=config.layers)
    rows, length = map(int, config.rows.split("x"))
    options = {"checkpointing": config.checkpointing, "micro_batches": config.micro_batches}
    step = TransformersStep(shape, rows, length, device="cuda", liger=liger, **options)
    seconds = timed(step, config.repeats, torch.cuda.synchronize)
    peak = torch.cuda.max_memory_allocated() / 2**30
    return Peer(None, program(liger), "Liger" if liger else "stored", seconds * 1e3, peak, step.num_parameters)


def timed(step: TransformersStep, repeats: int, wait: Any) -> float:
    """Median seconds of a step, the first two not counted."""
    seconds = []
    for _ in range(repeats + 2):
        wait()
        started = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def program(liger: bool) -> str:
    """What ran, with versions."""
    names = ("transformers", "torch", *(("liger-kernel",) if liger else ()))
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(measure(TransformersConfig(**json.loads(sys.argv[1]))))))
