"""Eight simulated CPU devices for every test; strict NumPy promotion for the tests of the library.

JAXLOGP_TEST_GPU=1 leaves a GPU visible, for `pytest -m gpu`.
"""

import os

if os.environ.get("JAXLOGP_TEST_GPU") != "1":
    os.environ["JAX_PLATFORMS"] = "cpu"
else:
    # Several processes of a test run share the GPU: none may keep what it has freed.
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import chex
import hypothesis
import jax
import pytest

chex.set_n_cpu_devices(8)

for name, derandomize in (("the same cases", True), ("random", False)):
    hypothesis.settings.register_profile(name, derandomize=derandomize, database=None, deadline=None, print_blob=True)


def pytest_configure(config):
    """Every default run draws the same cases; `--hypothesis-profile=random` draws new ones and prints its seed."""
    if config.getoption("--hypothesis-profile") is None:
        hypothesis.settings.load_profile("the same cases")


OPTIMIZE_ALL = {"JAXLOGP_TEST_OPTIMIZED", "JAXLOGP_TEST_GPU"}
OPTIMIZED = {"invariance", "test_invariant.py", "test_learning.py", "test_chunked_memory.py"}
"""Folders and files whose tests look at bits or at memory, or run for long: compiled as users compile."""


@pytest.fixture(autouse=True, scope="module")
def compile_effort(request):
    """Other programs are compiled with few optimizations, in about 0.4 of the CPU time: tests compile more than they run.

    `JAXLOGP_TEST_OPTIMIZED=1`, as in the lane of the library's tests on the newest JAX, compiles all of them as users do.
    """
    optimized = not OPTIMIZE_ALL.isdisjoint(os.environ) or not OPTIMIZED.isdisjoint(request.path.parts)
    jax.config.update("jax_disable_most_optimizations", not optimized)


if jax.__version_info__ < (0, 11):
    # XLA's fusion emitters take half of the time that is left, and later versions cannot do without them; modules in one
    # part take a tenth less. No public setting of JAX changes an option of XLA within a process.
    from jax._src import compiler

    CHEAP = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
    of_jax = compiler.get_compile_options

    def get_compile_options(*args, **kwargs):
        options = of_jax(*args, **kwargs)
        if jax.config.read("jax_disable_most_optimizations"):
            options.env_option_overrides = [*options.env_option_overrides, *CHEAP.items()]
        return options

    compiler.get_compile_options = get_compile_options


@pytest.fixture(autouse=True)
def strict_promotion(request):
    """The library never relies on implicit dtype or rank promotion; programs that use it may."""
    if not {"experiments", "benchmarks"}.isdisjoint(request.path.parts):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
