"""MaxText through its Tunix adapter, with Tunix's log-probs from jaxlogp. Run: python -m examples.recipes.maxtext_tunix"""

import jax
import numpy as np
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
from maxtext.utils import maxtext_utils, model_creation_utils
from tunix.rl import common

from jaxlogp import linear_log_probs


def compute_per_token_logps(graphdef, state, prompts, completions, pad_id, eos_id, stop_gradient=True, temperature=1.0):
    """Replaces `tunix.rl.common.compute_per_token_logps` for a `TunixMaxTextAdapter`, without images and packed rows."""
    adapter = nnx.merge(graphdef, state)
    decoder, config = adapter.base.decoder, adapter.base.config
    # The decoder's last step is the norm and the head. Only the norm stays, so that its result is what the head reads.
    object.__setattr__(decoder, "apply_output_head", lambda shared_embedding, y, *_: decoder.decoder_norm(y))
    tokens, positions, attention_mask, _ = common.process_ids(prompts, completions, pad_id, eos_id)
    hidden, _ = adapter(tokens, positions, None, attention_mask)
    options = {"temperature": temperature, "fp32_head": True}
    if config.logits_via_embedding:
        weight = adapter.base.token_embedder.embedding[...].astype("bfloat16")  # as MaxText rounds it
        options["logit_scale"] = hidden.shape[-1] ** -0.5 if config.normalize_embedding_logits else 1.0
        options["softcap"] = config.final_logits_soft_cap or None
    else:
        weight, options["weight_layout"] = decoder.logits_dense.kernel[...], "hv"
    log_probs = linear_log_probs(hidden[:, -completions.shape[1] - 1 : -1], weight, completions, **options).log_probs
    return jax.lax.stop_gradient(log_probs) if stop_gradient else log_probs


def tiny_model(tied):
    options = f"""model_name=qwen3-0.6b override_model_config=true vocab_size=96 base_num_decoder_layers=1 base_emb_dim=32
        base_mlp_dim=48 base_num_query_heads=2 base_num_kv_heads=1 head_dim=16 logits_via_embedding={tied} dtype=float32
        final_logits_soft_cap=5.0 normalize_embedding_logits=true attention=dot_product skip_jax_distributed_system=true"""
    config = pyconfig.initialize(["", pyconfig.__file__.replace("pyconfig.py", "base.yml"), *options.split()])
    mesh = maxtext_utils.get_mesh_from_config(config)
    return mesh, TunixMaxTextAdapter(model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0)))


def mean(params, function, graphdef, rest, rows):
    state, options = nnx.merge_state(params, rest), {"stop_gradient": False, "temperature": 0.9}
    return function(graphdef, state, rows[:, :4], rows[:, 4:], 0, 95, **options).mean()


def main():
    rows = jax.random.randint(jax.random.key(1), (2, 8), 1, 96).at[0, :2].set(0)  # two tokens of padding
    functions = common.compute_per_token_logps, compute_per_token_logps
    for tied in (True, False):
        mesh, adapter = tiny_model(tied)
        graphdef, params, rest = nnx.split(adapter, nnx.Param, ...)
        with jax.set_mesh(mesh):
            stock, ours = (jax.value_and_grad(mean)(params, each, graphdef, rest, rows) for each in functions)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), stock, ours)
        print(f"tied={tied}: {stock[0]:.6f}, with jaxlogp {ours[0]:.6f}; gradients equal")


if __name__ == "__main__":
    main()
