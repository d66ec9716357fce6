"""Names that the examples in docstrings use without importing them."""

import pytest

# Imported when a kernel is launched. It has no examples, and Triton, which it imports, may not be there.
collect_ignore = ["jaxlogp/head/triton/kernels.py"]


@pytest.fixture(autouse=True)
def names_for_examples(request):
    """Adds jax, jnp, np and the public names of jaxlogp to the namespace of doctests."""
    if not request.node.__class__.__name__.startswith("Doctest"):
        return
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxlogp

    public = {name: value for name, value in vars(jaxlogp).items() if not name.startswith("_")}
    request.getfixturevalue("doctest_namespace").update(public, jax=jax, jnp=jnp, np=np)
