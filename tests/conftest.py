"""Eight simulated CPU devices for every test; strict NumPy promotion for the tests of the library.

JAXLOGP_TEST_GPU=1 leaves a GPU in sight, for `pytest -m gpu`.
"""

import atexit
import os
import secrets
import shutil
import tempfile

if os.environ.get("JAXLOGP_TEST_GPU") != "1":
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Many tests run the same small trainer, and load what one of them has compiled. Each worker has a folder of its own:
    # JAX writes without a lock. The process that starts the workers removes them all.
    if "PYTEST_XDIST_WORKER" in os.environ:
        cache = os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], os.environ["PYTEST_XDIST_WORKER"])
    else:
        cache = tempfile.mkdtemp(prefix="jaxlogp-tests-")
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ.update(JAX_COMPILATION_CACHE_DIR=cache, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.2")
else:
    # Several processes of a test run share the GPU: none may keep what it has freed.
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import chex
import hypothesis
import jax
import pytest

chex.set_n_cpu_devices(8)
hypothesis.settings.register_profile("same examples in every run", derandomize=True, deadline=None)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """The default lane draws the same examples in every run; -m "slow ..." draws new ones, by a seed that is told."""
    random = config.option.markexpr.startswith("slow")
    hypothesis.settings.load_profile("random" if random else "same examples in every run")
    # The option reaches the workers of a parallel run, too.
    if random and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(secrets.randbelow(2**32))


def pytest_terminal_summary(terminalreporter, config):
    if config.option.hypothesis_seed is not None:
        terminalreporter.write_line(
            f"random examples: repeat them with --hypothesis-seed={config.option.hypothesis_seed}"
        )


@pytest.fixture(autouse=True)
def strict_promotion(request):
    """The library never relies on implicit dtype or rank promotion; optimisers and models of others may."""
    if "experiments" in request.path.parts:
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
