"""Eight simulated CPU devices for every test; strict NumPy promotion for the tests of the library.

JAXLOGP_TEST_GPU=1 leaves a GPU in sight, for `pytest -m gpu`.
"""

import atexit
import os
import shutil
import tempfile

if os.environ.get("JAXLOGP_TEST_GPU") != "1":
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Many tests run the same small trainer; what one has compiled the others of this run load, in every process of it.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = tempfile.mkdtemp(prefix="jaxlogp-tests-")
        os.environ.update(JAX_COMPILATION_CACHE_DIR=cache, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.2")
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
else:
    # Several processes of a test run share the GPU: none may keep what it has freed.
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion(request):
    """The library never relies on implicit dtype or rank promotion; optimisers and models of others may."""
    if "experiments" in request.path.parts:
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
