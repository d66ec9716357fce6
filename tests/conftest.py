"""Eight simulated CPU devices for every test; strict NumPy promotion for the tests of the library.

JAXLOGP_TEST_GPU=1 leaves a GPU visible, for `pytest -m gpu`.
"""

import functools
import gc
import os
import threading
from pathlib import Path

if os.environ.get("JAXLOGP_TEST_GPU") != "1":
    os.environ["JAX_PLATFORMS"] = "cpu"
else:
    # Several processes of a test run share the GPU: none may keep what it has freed.
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

# Products of NumPy are small here: further threads of OpenBLAS only wait for work, for 0.17 of the CPU time of the Hopper
# kernels' interpreter. For workers and commands: a plugin of pytest has imported NumPy in this process.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Commands of tests compile what they run, and leave the user's cache alone.
os.environ["JAXLOGP_CACHE"] = "none"

import chex
import hypothesis
import jax
import numpy as np
import pytest
from jax._src import cache_key, lru_cache
from jax._src import callback as jax_callbacks
from jax._src.interpreters import mlir
from jax.experimental.compilation_cache import compilation_cache

chex.set_n_cpu_devices(8)
# JAX holds hundreds of thousands of objects: looking through all of them took 0.04 of the CPU time.
gc.set_threshold(20_000, 10, 10)

for name, derandomize in (("the same cases", True), ("random", False)):
    hypothesis.settings.register_profile(name, derandomize=derandomize, database=None, deadline=None, print_blob=True)


def pytest_configure(config):
    """Every default run draws the same cases; `--hypothesis-profile=random` draws new ones and prints its seed."""
    if config.getoption("--hypothesis-profile") is None:
        hypothesis.settings.load_profile("the same cases")


OPTIMIZE_ALL = {"JAXLOGP_TEST_OPTIMIZED", "JAXLOGP_TEST_GPU"}
OPTIMIZED = {"invariance", "test_invariant.py", "test_chunked_memory.py"}
"""Folders and files whose tests look at bits or at memory: compiled as users compile."""


@pytest.fixture(autouse=True, scope="module")
def compile_effort(request):
    """Other programs are compiled with few optimizations, in about 0.4 of the CPU time: tests compile more than they run.

    `JAXLOGP_TEST_OPTIMIZED=1`, as in the lane of the library's tests on the newest JAX, compiles all of them as users do.
    """
    optimized = not OPTIMIZE_ALL.isdisjoint(os.environ) or not OPTIMIZED.isdisjoint(request.path.parts)
    jax.config.update("jax_disable_most_optimizations", not optimized)


@pytest.fixture
def few_optimizations():
    """For controls, whose result does not depend on them, in files that are compiled as users compile."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True, scope="module")
def garbage():
    """What a file leaves behind stays: looking through gigabytes of programs again and again would take seconds."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def lowering_contexts():
    """A file's programs are lowered in one MLIR context a thread; newer versions of JAX share contexts themselves.

    Otherwise every program has its own, which takes 5 ms to make and stays in memory for as long as the program.
    """
    if jax.__version_info__ >= (0, 12):
        yield
        return
    made = functools.cache(lambda thread, of_jax=mlir.make_ir_context: of_jax())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlir, "make_ir_context", lambda: made(threading.get_ident()))
        yield


COMPILE_THEMSELVES = {"test_compilation_cache.py", "test_memory.py", "test_hopper_gpu.py"}
"""Tests that look at what is compiled. The others of the trainer share their programs, as do those of the Hopper kernels:
many runs, and all data ranks of one, compile the same, and here each of them is compiled once.

Runs that compile all of their programs themselves, and have the same bits, are in test_reliability_trials.py.
"""


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """The folder of programs that tests share, whichever worker runs them; JAXLOGP_TEST_PROGRAMS names one that several
    commands share."""
    base = tmp_path_factory.getbasetemp()
    beside = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    folder = Path(os.environ.get("JAXLOGP_TEST_PROGRAMS", beside))
    folder.mkdir(exist_ok=True)
    return str(folder)


@pytest.fixture(autouse=True, scope="module")
def compiled_programs(request, programs):
    """A compilation cache for programs on any devices, as JAX has it on GPUs."""
    sharing = "experiments" in request.path.parts or request.path.name.startswith("test_hopper_")
    if not sharing or request.path.name in COMPILE_THEMSELVES:
        yield
        return
    of_jax = cache_key._hash_serialized_compile_options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_key, of_jax.__name__, lambda hashed, options, **_: of_jax(hashed, options, True))
        patch.setattr(lru_cache.LRUCache, "put", put_whole)
        use_programs_of(jax_compilation_cache_dir=programs, jax_persistent_cache_min_compile_time_secs=0.02)
        yield
        use_programs_of(jax_compilation_cache_dir=None, jax_persistent_cache_min_compile_time_secs=1.0)


def put_whole(cache, key, value):
    """JAX writes a program where it will lie: another worker could read half of it, or may have written it by now."""
    fresh = Path(cache.path, f"{key}-{os.getpid()}")
    fresh.write_bytes(value)
    fresh.replace(Path(cache.path, f"{key}{lru_cache._CACHE_SUFFIX}"))


def use_programs_of(**settings):
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


# XLA's fusion emitters take half of the time that is left, and later versions cannot do without them; modules in one part
# take a tenth less. No public setting of JAX changes an option of XLA within a process.
CHEAP = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
if jax.__version_info__ < (0, 11):
    from jax._src import compiler

    of_jax = compiler.get_compile_options

    def get_compile_options(*args, **kwargs):
        options = of_jax(*args, **kwargs)
        if jax.config.read("jax_disable_most_optimizations"):
            options.env_option_overrides = [*options.env_option_overrides, *CHEAP.items()]
        return options

    compiler.get_compile_options = get_compile_options


@pytest.fixture(autouse=True, scope="session")
def host_callbacks():
    """Callbacks get arrays of the host and Python integers, not arrays on a device.

    The interpreter of the Hopper kernels calls Python at each access to memory: 0.2 of its CPU time went into `device_put`.
    """
    if jax.__version_info__ < (0, 11):
        yield
        return
    of_jax = jax_callbacks.io_callback_impl

    def on_host(x):
        # A copy: XLA uses the memory again.
        return x.item() if x.ndim == 0 and x.dtype.kind in "biu" else np.array(x)

    def io_callback_impl(*args, callback, **options):
        return of_jax(callback=lambda: callback(*map(on_host, args)), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_callbacks, "io_callback_impl", io_callback_impl)
        yield


@pytest.fixture
def cheap_processes(monkeypatch):
    """Processes that a test starts compile as cheaply."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    if jax.__version_info__ < (0, 11):
        flags = [f"--{name}={int(value)}" for name, value in CHEAP.items()]
        monkeypatch.setenv("XLA_FLAGS", " ".join([os.environ.get("XLA_FLAGS", ""), *flags]))


@pytest.fixture(autouse=True, scope="module")
def pictures(request):
    """Runs prepare every panel, from their own metrics, but no picture, which takes 1.3 CPU s: test_plots.py has some."""
    if request.path.parent.name != "experiments" or request.path.name == "test_plots.py":
        yield
        return
    from experiments.runs import plots

    class Undrawn(plots.Figure):
        def savefig(self, file, **_):
            file.write(b"PNG")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "Figure", Undrawn)
        yield


@pytest.fixture(autouse=True)
def strict_promotion(request):
    """The library never relies on implicit dtype or rank promotion; programs that use it may."""
    if not {"experiments", "integrations", "benchmarks"}.isdisjoint(request.path.parts):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
