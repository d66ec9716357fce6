"""The Triton kernels without a GPU: their source in Triton's interpreter, and its compilation for sm_80 to sm_90.

Not run where Triton is not installed: pip install -e ".[triton]".
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import pytest

from jaxlogp import sharded_linear_log_probs
from jaxlogp.head import registry
from jaxlogp.head.call import head_call
from jaxlogp.head.hopper import HopperEngine
from jaxlogp.head.projection import HeadSpec
from jaxlogp.head.triton import TritonEngine, availability
from jaxlogp.head.triton.launch import kernel_constants
from jaxlogp.head.triton.tiles import TABLE
from tests.head import triton_case

ROOT = pathlib.Path(__file__).parent.parent.parent
SUITES = ("tests/head/test_engines.py", "tests/head/test_triton_engine.py")

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason='NOT RUN: Triton is not installed, so its kernels were not looked at (pip install -e ".[triton]")',
    ),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="of compiled kernels"),
]
# Bytes of shared memory that a program may have.
SHARED = {80: 163 * 1024, 86: 99 * 1024, 87: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
PLAIN = HeadSpec()
# Spilled bytes where bias, soft cap and entropy meet: outside of the loop over the hidden size.
ALL, ALL_SPILLS = HeadSpec(temperature=0.7, logit_scale=1.3, softcap=30.0), 512


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """Products contracted with additions: the default that Triton 3.9 warns of changing."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_every_test_of_the_engine_passes_with_the_kernels_in_the_interpreter(which):
    # In a process of its own: Triton reads the switch when it is imported.
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", "-m", which, "-k", "triton", *SUITES]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]


def compiled(name, config, capability, spec, hidden_size, bias, window=None, dtype="bf16", vocab_dim=0):
    """(Triton's compiled kernel, what the assembler says of registers and spills)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(triton_case.load_kernels("compiled_kernels"), name)
    operand = f"*{dtype}"
    types = {"hidden": operand, "weight": operand, "bias": "*fp32", "target": "*i32", "scalars": "*fp32"}
    types |= {"bounds": "*i32", "tokens": "i32", "vocab": "i32", "out": "*fp32" if window is None else operand}
    constants = {
        **kernel_constants(spec, vocab_dim, config),
        "HIDDEN": hidden_size,
        "HAS_BIAS": bias,
        "WITH_ENTROPY": True,
    }
    if window is not None:
        constants["WINDOW"] = window
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    # As a launch says of every array: it begins at a multiple of 16 bytes.
    aligned = [index for index, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(
        function,
        signature,
        constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(source, target=target, options={"num_warps": config.warps, "num_stages": config.stages})
    return kernel, assembled(kernel.asm["ptx"], capability)


def assembled(ptx, capability):
    import triton

    # Newer Tritons bring a second assembler, for newer PTX.
    folder = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
    version = re.search(r"\.version (\S+)", ptx).group(1)
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch, "kernel.ptx")
        path.write_text(ptx)
        arch = f"sm_{capability}a" if capability == 90 else f"sm_{capability}"
        for name in ("ptxas", "ptxas-blackwell"):
            command = [folder / name, "-v", f"--gpu-name={arch}", path, "-o", path.with_suffix(".cubin")]
            finished = subprocess.run(command, capture_output=True, text=True)
            if finished.returncode == 0:
                return finished.stderr
    pytest.fail(f"no assembler took PTX {version}: {finished.stderr}")


@pytest.mark.parametrize("capability", [80, 90, *(pytest.param(n, marks=pytest.mark.slow) for n in (86, 87, 89))])
@pytest.mark.parametrize("name", ["forward_kernel", "gradient_kernel"])
@pytest.mark.parametrize("all_options", [False, True], ids=["plain", "all options"])
@pytest.mark.parametrize("vocab_dim", [0, 1])
def test_kernels_compile_and_do_not_spill(tmp_path, monkeypatch, capability, name, all_options, vocab_dim):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = TABLE[capability].forward if name == "forward_kernel" else TABLE[capability].gradient
    window = None if name == "forward_kernel" else 15360
    spec = ALL if all_options else PLAIN
    kernel, report = compiled(name, config, capability, spec, 4096, all_options, window, vocab_dim=vocab_dim)
    registers = int(re.search(r"Used (\d+) registers", report).group(1))
    stored, loaded = (int(re.search(rf"(\d+) bytes spill {way}", report).group(1)) for way in ("stores", "loads"))
    print(f"{name} sm_{capability} registers {registers} spills {stored} {loaded} shared {kernel.metadata.shared}")
    assert max(stored, loaded) <= (ALL_SPILLS if all_options else 0), report
    # The assembler says so when it waits for each matrix product, as it does when an accumulator is spilled.
    assert "serialized" not in report
    assert kernel.metadata.shared <= SHARED[capability]
    product = "wgmma.mma_async" if capability == 90 else "mma.sync"
    assert product in kernel.asm["ptx"]
    loads = re.findall(r"cp\.async\.\w+\.shared\.global.*?, (0x\w+)", kernel.asm["ptx"])
    assert set(loads) == {"0x10"}, "both operands are read 16 bytes at a time"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype, hidden_size, window", [("fp16", 896, 13696), ("bf16", 4080, 257)])
def test_other_dtypes_and_shapes_compile(tmp_path, monkeypatch, capability, dtype, hidden_size, window):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name, width in (("forward_kernel", None), ("gradient_kernel", window)):
        config = TABLE[capability].forward if width is None else TABLE[capability].gradient
        _, report = compiled(name, config, capability, PLAIN, hidden_size, False, width, dtype)
        assert "serialized" not in report


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="the Hopper kernels can run")
def test_auto_takes_triton_on_hopper_where_jax_is_too_old_for_the_hopper_kernels(monkeypatch):
    monkeypatch.setitem(registry.ENGINES, "hopper", HopperEngine(check_device=False))
    monkeypatch.setitem(registry.ENGINES, "triton", TritonEngine(capability=90))
    hidden, weight = jnp.ones((4, 128), jnp.bfloat16), jnp.ones((256, 128), jnp.bfloat16)
    layout = {"axis_name": None, "vocab": None, "weight_layout": "vh", "sequence_dim": None}
    options = {"out_of_vocab": "error", "with_entropy": False}
    call = head_call(hidden, weight, None, jnp.zeros(4, jnp.int32), None, PLAIN, **layout, **options)
    monkeypatch.setattr("jaxlogp.head.triton.engine.device_capability", lambda: 90)
    chosen, reason = registry.choose_engine("auto", call)
    assert chosen.name == "triton"
    assert reason.startswith(f"auto; hopper not used: JAX {jax.__version__} is older than 0.11")


@pytest.mark.parametrize("capability", [80, 90])
def test_the_whole_call_lowers_for_cuda_without_a_gpu(capability):
    reason = availability.why_not_installed()
    if reason is not None:
        pytest.skip(f"NOT RUN: {reason}")
    engine = TritonEngine(capability=capability)
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=auto, devices=jax.devices()[:4])

    def objective(hidden, weight, bias, targets, mask):
        call = {"mesh": mesh, "mask": mask, "bias": bias, "with_entropy": True, "engine": engine}
        out = sharded_linear_log_probs(hidden, weight, targets, **call)
        return jnp.sum(out.log_probs) + jnp.sum(out.entropy)

    shapes = [((2048, 256), jnp.bfloat16), ((30001, 256), jnp.bfloat16), ((30001,), jnp.float32)]
    shapes += [((2048,), jnp.int32), ((2048,), bool)]
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    traced = jax.jit(jax.grad(objective, argnums=(0, 1, 2))).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Statistics, and one window's gradient for each number of rows among which the backward chooses.
    assert text.count("custom_call @triton_kernel_call") == 5
