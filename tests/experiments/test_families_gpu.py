"""The families of Hugging Face models on a GPU, beside transformers; run with JAXLOGP_TEST_GPU=1 and -m gpu."""

import jax
import numpy as np
import pytest

from tests.experiments.test_pretrained import FAMILIES, family_logits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(jax.devices()[0].platform != "gpu", reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_are_those_of_transformers(family, tmp_path):
    # Products of fp32 are exact fp32 products on a GPU too, never TF32.
    np.testing.assert_allclose(*family_logits(family, tmp_path, dtype="float32"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_are_near_them(family, tmp_path):
    seen, wanted = family_logits(family, tmp_path, dtype="bfloat16")
    # Two layers round some twenty times to bf16, 2^-9 each and independently: 20^0.5 · 2^-9 = 0.9 %, within a factor of 4.
    assert np.linalg.norm(seen - wanted) < 0.036 * np.linalg.norm(wanted)
