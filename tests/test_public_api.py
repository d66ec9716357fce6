"""The names that `import jaxlogp` provides, and the modules that it does not import."""

import json
import os
import subprocess
import sys

import pytest

import jaxlogp

NAMES = """
    VocabShards TokenLogProbs log_probs_from_logits sharded_log_probs_from_logits linear_log_probs ChunkedEngine
    sharded_linear_log_probs
    embedding_lookup sharded_embedding_lookup FixedOrderEngine FixedOrderHopperEngine ReductionOrder fixed_order_sum
    WeightedSum weighted_sum masked_sum masked_count masked_mean masked_max masked_min
    PolicyLoss policy_loss policy_metrics policy_metric_terms log_ratio ratio kl_k1 kl_k2 kl_k3
    GradientFilter skipped_tiles
    Engine HeadCall HeadSpec HopperEngine TritonEngine ReferenceEngine register_engine why_not nan_unless_equal
    linear_policy_loss sharded_linear_policy_loss drift_report DriftReport check_invariance InvarianceReport
""".split()
EXTRAS = """
    flax optax orbax tyro rich chex beartype hypothesis tensorboardX matplotlib torch transformers triton jax_triton
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_name_is_exported_and_documented(name):
    thing = getattr(jaxlogp, name)
    assert thing.__doc__ and len(thing.__doc__.strip().splitlines()[0]) > 10


def test_import_is_light_and_starts_no_backend():
    code = (
        "import json, sys\n"
        "import jaxlogp\n"
        "from jax._src import xla_bridge\n"
        "loaded = sorted({name.split('.')[0] for name in sys.modules})\n"
        "mosaic = 'jax.experimental.mosaic.gpu' in sys.modules\n"
        "print(json.dumps([loaded, bool(xla_bridge._backends), mosaic]))\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stderr
    loaded, started, mosaic = json.loads(finished.stdout)
    assert "jax" in loaded
    assert not set(EXTRAS) & set(loaded)
    assert not mosaic, "importing the backend of GPU kernels takes half a second"
    assert not started, "importing the library must not create devices"


def test_no_private_name_and_no_module_internals_leak():
    public = {name for name in vars(jaxlogp) if not name.startswith("_")}
    assert not public & {"jnp", "np", "jax", "numpy", "annotations", "partial"}
