"""Writes a run's newest checkpoint, or a GGUF file, as a directory that transformers loads.

    python -m experiments.export runs/NAME OUT
    python -m experiments.export model.gguf OUT --dtype bfloat16

Needs the extra hf. The directory appears whole or not at all.
"""

if __name__ == "__main__":
    # Before the imports, which Ctrl-C ends in one line too.
    from experiments.entry import run_module

    run_module("experiments.export")

from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.command_line import run_command
from experiments.loop.load import load_model
from experiments.models.decoder_config import DTYPES
from experiments.models.huggingface.export import export
from experiments.terminal import printable
from jaxlogp.errors import require


@dataclass(frozen=True)
class ExportConfig:
    """Options of an export."""

    model: tyro.conf.Positional[str]
    """Run folder, GGUF file or Hugging Face directory."""
    out: tyro.conf.Positional[str]
    """Directory to create."""
    dtype: str | None = None
    """Dtype of the stored weights: float32 or bfloat16. None: that of the run's parameters."""


def main(config: ExportConfig) -> Path:
    """Loads and writes a model, and returns the directory, which must not exist yet."""
    out = Path(config.out)
    require(not out.exists(), "out", "a directory that does not exist yet", out)
    require(config.dtype in (None, *DTYPES), "--dtype", " or ".join(DTYPES), config.dtype)
    loaded = load_model(config.model)
    export(loaded.params, loaded.config, loaded.files(), out, config.dtype or loaded.config.param_dtype)
    return out


def run_cli(arguments: list[str] | None = None) -> Path:
    def run(config: ExportConfig) -> Path:
        out = main(config)
        print(printable(f"written: {out}"))
        return out

    return run_command(ExportConfig, run, program="experiments.export", description=__doc__, arguments=arguments)
