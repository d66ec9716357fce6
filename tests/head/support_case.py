"""Heads on a support, and their values and gradients in float64, token by token."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlogp import Support, linear_log_probs
from jaxlogp.head import registry
from tests import oracle

# Contract bounds for fp32 operands, against float64 on the same inputs.
VALUE_ERROR, GRADIENT_ERROR = 1e-5, 2e-5
ALL_OPTIONS = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 5.0}


class Values(NamedTuple):
    """What a head gives, for one cotangent of each log-prob and entropy."""

    log_probs: np.ndarray
    entropy: np.ndarray
    lse: np.ndarray
    hidden: np.ndarray
    weight: np.ndarray
    bias: np.ndarray


def kept_ids(rng, targets, vocab, most):
    """Ids of each token in any order, its target among them: one id, none, up to ``most``, in turn."""
    lists = []
    for index, target in enumerate(targets.reshape(-1)):
        size = (1, 0, most, int(rng.integers(2, most)))[index % 4]
        others = rng.permutation(np.delete(np.arange(vocab), target))[: max(size - 1, 0)]
        lists.append(rng.permutation([target, *others]).tolist() if size else [])
    return lists


def case(tokens=(3, 8), width=24, vocab=60, *, dtype=jnp.float32, weight_dtype=None, most=17, spare=9, seed=0):
    """Operands, supports of 0 to ``most`` ids, targets on both edges of the vocabulary, and a masked token with ids."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, vocab, tokens).astype(np.int32)
    targets.flat[[2, 3]] = 0, vocab - 1
    lists = kept_ids(rng, targets, vocab, most)
    mask = np.ones(tokens, bool)
    mask.flat[6] = False
    size = sum(map(len, lists))
    return {
        "hidden": jnp.asarray(rng.normal(size=(*tokens, width)), dtype),
        "weight": jnp.asarray(rng.normal(0.0, 2.0 / width**0.5, (vocab, width)), weight_dtype or dtype),
        "bias": jnp.asarray(rng.normal(size=vocab), jnp.float32),
        "targets": targets,
        "mask": mask,
        "lists": lists,
        "support": Support.from_lists(lists, capacity=size + spare, shape=tokens),
        "g_lp": jnp.asarray(rng.normal(size=tokens), jnp.float32),
        "g_entropy": jnp.asarray(rng.normal(size=tokens), jnp.float32),
    }


@functools.partial(jax.jit, static_argnames=("options", "engines"))
def _program(operands, given, *, options, engines):
    def objective(operands):
        hidden, weight, bias = operands
        more = {"bias": bias, "support": given["support"], "with_entropy": True, "with_lse": True, **dict(options)}
        result = linear_log_probs(hidden, weight, given["targets"], given["mask"], **more)
        return jnp.sum(result.log_probs * given["g_lp"] + result.entropy * given["g_entropy"]), result

    return jax.grad(objective, has_aux=True)(operands)


def gradients(data, **options):
    """`Values` of ``linear_log_probs``, compiled once for its options and for the engines that a test has put in."""
    arrays = {name: data[name] for name in ("targets", "mask", "support", "g_lp", "g_entropy")}
    operands = data["hidden"], data["weight"], data["bias"]
    engines = registry.AUTOMATIC_ON_SUPPORT
    gradient, result = _program(operands, arrays, options=tuple(options.items()), engines=engines)
    return Values(*result, *gradient)


def expected(data, **options):
    """`Values` in float64, by a loop over the tokens."""
    head = oracle.Head(**{name: value for name, value in options.items() if name in oracle.Head._fields})
    hidden, weight, bias = (oracle.f64(data[name]) for name in ("hidden", "weight", "bias"))
    shape = data["targets"].shape
    per_token = {name: np.zeros(shape) for name in ("log_probs", "entropy", "lse")}
    grads = np.zeros_like(hidden), np.zeros_like(weight), np.zeros_like(bias)
    for place, kept in zip(np.ndindex(*shape), data["lists"], strict=True):
        if not data["mask"][place] or not kept:
            continue
        raw = head.logit_scale * (weight[kept] @ hidden[place] + bias[kept])
        slope = head.logit_scale / head.temperature
        if head.softcap is None:
            z = raw / head.temperature
        else:
            z = head.softcap * np.tanh(raw / head.softcap) / head.temperature
            slope = slope * (1.0 - np.tanh(raw / head.softcap) ** 2)
        lse = np.log(np.exp(z - z.max()).sum()) + z.max()
        p = np.exp(z - lse)
        target = np.array(kept) == data["targets"][place]
        per_token["log_probs"][place] = z[target][0] - lse
        per_token["lse"][place] = lse
        per_token["entropy"][place] = lse - p @ z
        dz = float(data["g_lp"][place]) * (target - p) + float(data["g_entropy"][place]) * p * (p @ z - z)
        dz = dz * slope
        grads[0][place] = dz @ weight[kept]
        np.add.at(grads[1], kept, dz[:, None] * hidden[place])
        np.add.at(grads[2], kept, dz)
    return Values(per_token["log_probs"], per_token["entropy"], per_token["lse"], *grads)


def check(seen, wanted, gradient_error=GRADIENT_ERROR):
    """Values are fp32, and all are within the bounds."""
    for name in ("log_probs", "entropy", "lse"):
        assert getattr(seen, name).dtype == jnp.float32
        assert oracle.scaled_error(getattr(seen, name), getattr(wanted, name)) < VALUE_ERROR, name
    for name in ("hidden", "weight", "bias"):
        error = oracle.relative_error(getattr(seen, name), getattr(wanted, name))
        assert error < gradient_error, (name, error)
