"""The recomputation that a run chooses where its options name none: what a policy keeps, and what is tried."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from experiments.config import Config
from experiments.loop import memory, remat
from experiments.loop import run as run_module
from experiments.loop.remat import FROM_LEAST, kept_bytes
from experiments.loop.run import set_up
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.runs.config_file import load_config
from tests.experiments.tiny import tiny

SHAPE = DecoderConfig.qwen3(
    vocab_size=24, hidden_size=32, intermediate_size=80, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8
)
ROWS, LENGTH = 2, 64


def residual_bytes(decoder):
    """Bytes of all that the backward pass of the body takes over from its forward pass."""
    graph, params = nnx.split(Decoder(decoder, rngs=nnx.Rngs(0)))
    tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)

    def body(params):
        return nnx.merge(graph, params).hidden_states(tokens, positions, tokens)

    backward = jax.eval_shape(lambda params: jax.vjp(body, params)[1], params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))


@pytest.mark.parametrize(("dtype", "residual"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "float32")])
def test_what_layers_keep_is_what_jax_saves(dtype, residual):
    """Beside it are tables, masks and parameters, the same with every policy."""
    plain = dataclasses.replace(SHAPE, dtype=dtype, residual_dtype=residual, attention="chunked")
    shapes = [dataclasses.replace(plain, remat=policy) for policy in FROM_LEAST]
    beside = {residual_bytes(each) - kept_bytes(each, each.remat, ROWS * LENGTH) for each in shapes}
    assert len(beside) == 1 and beside.pop() > 0


def chosen(tmp_path, monkeypatch, limit, **changes):
    """What a run says of its recomputation, and what it keeps, where a device has so many bytes."""
    for module in (remat, memory):
        monkeypatch.setattr(module, "device_limit", lambda devices: limit)
    run = set_up(tiny(tmp_path, "run", quiet=False, **{"model": {"remat": "auto"}} | changes))
    run.lock.release()
    made = run.setup.model.decoder.remat
    assert load_config(run.folder.config, Config).model.remat == run.setup.config.model.remat == made
    return made


def said(capsys):
    lines = capsys.readouterr().out.splitlines()
    return [each.split(" (")[0].rpartition(": ")[2] for each in lines if each.startswith("recomputation")]


@pytest.mark.parametrize(("limit", "policy"), [(None, "none"), (10**9, "products"), (3 * 10**5, "full")])
def test_the_least_that_is_expected_to_fit_is_taken_kept_and_said(tmp_path, monkeypatch, capsys, limit, policy):
    monkeypatch.setattr("experiments.loop.run.say_memory", lambda *given: None)
    assert chosen(tmp_path, monkeypatch, limit) == policy
    assert said(capsys) == ([] if limit is None else [policy])


@pytest.mark.costly
def test_programs_that_do_not_fit_are_compiled_again_with_more_recomputation(tmp_path, monkeypatch, capsys):
    need, tried = run_module.say_memory, []

    def refuse_first(setup, *given):
        tried.append(setup.config.model.remat)
        if len(tried) == 1:
            raise memory.DoesNotFit("memory: a device needs more")
        need(setup, *given)

    monkeypatch.setattr(run_module, "say_memory", refuse_first)
    assert chosen(tmp_path, monkeypatch, 10**9) == "attention" and tried == ["products", "attention"]
    assert said(capsys) == ["products", "attention"]


@pytest.mark.costly
def test_a_named_recomputation_stays(tmp_path, monkeypatch, capsys):
    assert chosen(tmp_path, monkeypatch, 10**9, model={"remat": "attention"}) == "attention"
    assert chosen(tmp_path / "fixed", monkeypatch, 10**9, invariant=True) == "none" and not said(capsys)
