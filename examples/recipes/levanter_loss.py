"""Levanter with the log-probs of its fused cross-entropy from jaxlogp. Run: python -m examples.recipes.levanter_loss"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from levanter.dpo import logp_sum
from levanter.kernels.pallas.fused_cross_entropy_loss import api
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample

from jaxlogp import linear_log_probs


def cross_entropy(x, labels, w, *, logit_soft_cap=None, return_argmax=False, **_):
    """An entry of Levanter's `IMPLEMENTATIONS`: per-token losses [B] and log-sum-exps [B], both differentiable."""
    if return_argmax:
        raise NotImplementedError("jaxlogp computes no argmax")
    log_probs = linear_log_probs(x, w, labels, softcap=logit_soft_cap, weight_layout="hv").log_probs
    # Dead code for the compiler unless a z-loss reads it.
    target_logits = jnp.einsum("bh,hb->b", x, w[:, labels], preferred_element_type=jnp.float32)
    if logit_soft_cap is not None:
        target_logits = logit_soft_cap * jnp.tanh(target_logits / logit_soft_cap)
    return -log_probs, target_logits - log_probs


def install():
    """Makes Levanter try jaxlogp first, and its own implementations where that raises NotImplementedError."""
    defaults = api._default_implementations()
    api.IMPLEMENTATIONS["jaxlogp"] = cross_entropy
    api._default_implementations = lambda: ("jaxlogp", *defaults)


def main():
    Vocab = hax.Axis("vocab", 96)
    config = LlamaConfig(max_seq_len=8, hidden_dim=32, intermediate_dim=48, num_layers=1, num_heads=2, num_kv_heads=1)
    model = config.build(Vocab, key=jax.random.key(0))
    tokens = hax.random.randint(jax.random.key(1), model.Pos, 0, Vocab.size)
    example = LmExample.causal(tokens)

    @eqx.filter_value_and_grad
    def objective(model):
        """The log-prob of a row as in DPO, and a z-loss."""
        penalty = model.compute_next_token_loss(example, logsumexp_weight=0.1, logit_soft_cap=5.0)
        return (logp_sum(model, example) + penalty).scalar()

    stock = objective(model)
    install()
    ours = objective(model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), stock, ours)
    assert "jaxlogp" in api._SELECTED_IMPL_LOGGED
    print(f"{stock[0]:.6f}, with jaxlogp {ours[0]:.6f}; gradients equal")


if __name__ == "__main__":
    main()
