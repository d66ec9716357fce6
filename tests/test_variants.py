"""Every public function of arrays under chex's variants, with and without jit on arrays of the host: one result.

The reference is the result without jit, on JAX arrays; whether it is correct is for the other tests. The arrays are
NumPy's, so chex's variants by device would repeat this: one is the reference itself, the other is the one without jit.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxlogp
from jaxlogp.head import FixedOrderEngine
from jaxlogp.invariance import ReductionOrder
from tests import oracle

TOKENS, HIDDEN, VOCAB = (3, 5), 16, 40
RNG = np.random.default_rng(0)
HIDDENS = RNG.normal(size=(*TOKENS, HIDDEN)).astype(np.float32)
WEIGHT = RNG.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
TARGETS = RNG.integers(0, VOCAB, TOKENS).astype(np.int32)
MASK = RNG.random(TOKENS) < 0.7
OLD = RNG.normal(-2.0, 0.5, TOKENS).astype(np.float32)
NEW = (OLD + RNG.normal(0.0, 0.3, TOKENS)).astype(np.float32)
ADVANTAGES = RNG.normal(size=TOKENS).astype(np.float32)
IDS = np.repeat(np.arange(3, dtype=np.int32), 5).reshape(TOKENS)
POLICY = (NEW, OLD, ADVANTAGES, MASK)
FIXED = FixedOrderEngine(ReductionOrder(granules=8, vocab_tile=64, row_block=64))


def head(engine):
    return lambda h, w, t, m: jaxlogp.linear_log_probs(h, w, t, mask=m, with_entropy=True, engine=engine)


def gspo(new, old, advantages, mask, ids):
    return jaxlogp.policy_loss(
        new, old, advantages, mask, loss=jaxlogp.losses.gspo(), document_ids=ids, num_documents=3
    )


def metrics(new, old, advantages, mask, ids):
    return jaxlogp.policy_metrics(new, old, advantages, mask, document_ids=ids, num_documents=3)


CASES = {
    "linear_log_probs chunked": (head("chunked"), (HIDDENS, WEIGHT, TARGETS, MASK)),
    "linear_log_probs reference": (head("reference"), (HIDDENS, WEIGHT, TARGETS, MASK)),
    "linear_log_probs fixed order": (head(FIXED), (HIDDENS, WEIGHT, TARGETS, MASK)),
    "log_probs_from_logits": (
        lambda z, t, m: jaxlogp.log_probs_from_logits(z, t, mask=m, with_entropy=True, temperature=0.7),
        (HIDDENS @ WEIGHT.T, TARGETS, MASK),
    ),
    "linear_policy_loss": (
        lambda h, w, t, old, a, m: jaxlogp.linear_policy_loss(h, w, t, old, a, m, with_entropy=True),
        (HIDDENS, WEIGHT, TARGETS, OLD, ADVANTAGES, MASK),
    ),
    "head_logits": (jaxlogp.head_logits, (HIDDENS, WEIGHT)),
    "embedding_lookup": (jaxlogp.embedding_lookup, (WEIGHT, TARGETS)),
    "weighted_sum": (jaxlogp.weighted_sum, (NEW, MASK)),
    "masked_sum": (jaxlogp.masked_sum, (NEW, MASK)),
    "masked_count": (jaxlogp.masked_count, (NEW, MASK)),
    "masked_mean": (jaxlogp.masked_mean, (NEW, MASK)),
    "masked_max": (jaxlogp.masked_max, (NEW, MASK)),
    "masked_min": (jaxlogp.masked_min, (NEW, MASK)),
    "policy_loss grpo": (jaxlogp.policy_loss, POLICY),
    "policy_loss gspo": (gspo, (*POLICY, IDS)),
    "policy_metrics": (metrics, (*POLICY, IDS)),
    "log_ratio": (jaxlogp.log_ratio, (NEW, OLD, MASK)),
    "ratio": (jaxlogp.ratio, (NEW, OLD, MASK)),
    "kl_k1": (jaxlogp.kl_k1, (NEW, OLD, MASK)),
    "kl_k2": (jaxlogp.kl_k2, (NEW, OLD, MASK)),
    "kl_k3": (jaxlogp.kl_k3, (NEW, OLD, MASK)),
    "group_advantages": (jaxlogp.group_advantages, (NEW,)),
    "leave_one_out_advantages": (jaxlogp.leave_one_out_advantages, (NEW,)),
    "owners": (jaxlogp.VocabShards.even(VOCAB, 3).owners, (TARGETS, MASK)),
}
# Other programs may sum in another order, relative or absolute: a log-prob is a logit, of 16 products with Σ|h w| < 24,
# minus a log Σ e^z of such logits. All other sums here are of at most 15 values of size 1.
NOT_BITWISE = 2 * oracle.fp32_bound(24.0, HIDDEN)


class Variants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(*((name, name) for name in CASES))
    def test_one_result(self, name):
        function, arrays = CASES[name]
        wanted = function(*(jnp.asarray(array) for array in arrays))
        result = self.variant(function)(*arrays)
        chex.assert_trees_all_equal_shapes_and_dtypes(
            jax.tree.map(jnp.asarray, result), jax.tree.map(jnp.asarray, wanted)
        )
        chex.assert_tree_all_finite(result)
        if name == "linear_log_probs fixed order":
            chex.assert_trees_all_equal(result, wanted)
        chex.assert_trees_all_close(result, wanted, rtol=NOT_BITWISE, atol=NOT_BITWISE)
