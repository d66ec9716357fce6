"""Products of fp32 operands ask for full precision: without that, GPUs multiply them in TF32, of ten bits."""

import re

import jax.numpy as jnp
import pytest

from jaxlogp.head import ChunkedEngine, FixedOrderEngine
from jaxlogp.invariance import ReductionOrder
from tests.head import cases

FIXED_ORDER = FixedOrderEngine(ReductionOrder(granules=8, vocab_tile=64, row_block=64))
PRODUCT = re.compile(r"stablehlo\.dot_general .*")


def products(text):
    return PRODUCT.findall(text)


@pytest.mark.parametrize("engine", ["reference", ChunkedEngine(7, 64), FIXED_ORDER], ids=str)
@pytest.mark.parametrize("options", [{}, {"fp32_head": True}], ids=str)
def test_every_fp32_product_of_values_and_gradients_is_never_tf32(engine, options):
    data = cases.case(dtypes=jnp.bfloat16 if options else jnp.float32)
    found = products(cases.lowered_for_cuda(data, engine, **options))
    assert len(found) >= 3, "logits, and the gradients of hidden states and weight"
    for product in found:
        assert "precision = [HIGHEST, HIGHEST]" in product and "bf16" not in product, product


def test_products_of_16_bits_ask_for_nothing_more():
    """The negative control: the search above sees the precision of a product."""
    for product in products(cases.lowered_for_cuda(cases.case(), "chunked")):
        assert "bf16" in product and "HIGHEST" not in product
