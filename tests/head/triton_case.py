"""Runs the source of the Triton kernels on the CPU in Triton's interpreter, on NumPy arrays."""

import contextlib
import importlib.util
import sys
import threading
import types
import warnings

import jax
import ml_dtypes
import numpy as np

from jaxlogp.head import triton as package

NAMES = {
    np.dtype(ml_dtypes.bfloat16): "bfloat16",
    np.dtype(np.float16): "float16",
    np.dtype(np.float32): "float32",
    np.dtype(np.int32): "int32",
}


def load_kernels(name):
    """A copy of the kernels' module of its own, decorated by whatever Triton's switches say now."""
    path = package.__path__[0] + "/kernels.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # Triton reads a kernel's source through its module.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class HostTensor:
    """A NumPy array behind the few methods that the interpreter asks of a tensor. Memory is shared, never copied."""

    def __init__(self, array):
        self.array = array
        # The name from which Triton takes the pointer's type.
        self.dtype = NAMES[array.dtype]

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides

    def cpu(self):
        return self

    def new_empty(self, size, device):
        return HostTensor(self.array)

    def set_(self, storage, offset, size, stride):
        self.array = storage.array

    def copy_(self, other):
        assert other.array is self.array


@contextlib.contextmanager
def mended_interpreter():
    """Three gaps closed: it multiplies the bits of bfloat16 as integers, it cuts off where a GPU rounds to bfloat16, and one
    of its conversions to an index is refused by NumPy 2.4."""
    from triton import language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    create_dot, cast_impl, patch_tensor = builder.create_dot, builder.cast_impl, interpreter._patch_lang_tensor

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return type(handle)((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self, a, b, *rest):
        return create_dot(self, widened(a), widened(b), *rest)

    def cast(self, source, dtype):
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast_impl(self, source, dtype)
        return type(source)(source.data.astype(ml_dtypes.bfloat16).view(np.uint16), dtype.scalar)

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    builder.create_dot, builder.cast_impl, interpreter._patch_lang_tensor = dot, cast, patch
    try:
        yield
    finally:
        builder.create_dot, builder.cast_impl, interpreter._patch_lang_tensor = create_dot, cast_impl, patch_tensor


@contextlib.contextmanager
def interpreted_launches():
    """Inside, ``jax_triton.triton_call`` runs a kernel by Triton's interpreter, and the kernels are made for it."""
    import triton

    assert triton.knobs.runtime.interpret, "Triton must be imported with TRITON_INTERPRET=1"
    # The interpreter's program ids are global.
    lock = threading.Lock()

    def triton_call(*operands, kernel, out_shape, grid, num_warps, num_stages, compute_capability, **constants):
        del num_warps, num_stages, compute_capability
        arrays = [x for x in operands if not isinstance(x, int)]

        def host(*arrays):
            values = iter(np.array(x) for x in arrays)
            # What a kernel leaves unwritten is NaN.
            out = np.full(out_shape.shape, np.nan, out_shape.dtype)
            inputs = [x if isinstance(x, int) else HostTensor(next(values)) for x in operands]
            with lock, warnings.catch_warnings():
                # Of rows of NaN, and of products with inf.
                warnings.simplefilter("ignore", RuntimeWarning)
                kernel[grid](*inputs, HostTensor(out), **constants)
            return out

        return jax.pure_callback(host, out_shape, *arrays)

    modules = {
        "jax_triton": types.SimpleNamespace(triton_call=triton_call),
        "jaxlogp.head.triton.kernels": load_kernels("interpreted_kernels"),
    }
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        with mended_interpreter():
            yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
