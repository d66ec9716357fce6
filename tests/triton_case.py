"""Runs the Triton kernels' own source on the CPU by Triton's interpreter, on NumPy arrays."""

import contextlib
import importlib.util
import sys
import threading
import types

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


def _widen(handle, triton):
    """A bfloat16 operand as fp32, exactly; the interpreter keeps its bits as integers and would multiply these."""
    if handle.dtype.scalar != triton.language.bfloat16:
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return type(handle)(wide, triton.language.float32)


def teach_interpreter_bfloat16(triton):
    """Its matrix product does not know bfloat16."""
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        return plain(self, _widen(a, triton), _widen(b, triton), *rest)

    InterpreterBuilder.create_dot = create_dot
    return lambda: setattr(InterpreterBuilder, "create_dot", plain)


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
            with lock:
                kernel[grid](*inputs, HostTensor(out), **constants)
            return out

        return jax.pure_callback(host, out_shape, *arrays)

    modules = {
        "jax_triton": types.SimpleNamespace(triton_call=triton_call),
        "jaxlogp.head.triton.kernels": load_kernels("interpreted_kernels"),
    }
    before = {name: sys.modules.get(name) for name in modules}
    undo = teach_interpreter_bfloat16(triton)
    sys.modules.update(modules)
    try:
        yield
    finally:
        undo()
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
