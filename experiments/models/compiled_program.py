"""Programs that are compiled before their first call."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from experiments.models.placement import bytes_a_device

LIBRARY_ALONE = {"xla_gpu_enable_triton_gemm": False}
"""Compiler options with which a GPU's library multiplies, and not XLA's own kernels."""


class CompiledProgram(NamedTuple):
    """A program that was compiled before its first call, with the shapes, dtypes and places of what it returns."""

    compiled: jax.stages.Compiled
    results: Any

    def bytes_beside(self, held: int) -> int | None:
        """Returns the most bytes it takes per device beside arguments of `held` bytes; None if the compiler does not say."""
        needs = self.compiled.memory_analysis()
        if needs is None:
            return None
        arguments = max(0, needs.argument_size_in_bytes - held)
        return arguments + needs.temp_size_in_bytes + needs.output_size_in_bytes - needs.alias_size_in_bytes


def shapes_on(device: jax.Device, tree: Any) -> Any:
    """Returns shapes and dtypes of a tree's arrays as those of arrays on a device."""
    place = SingleDeviceSharding(device)

    def there(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place, weak_type=getattr(x, "weak_type", False))

    return jax.tree.map(there, tree)


def largest(*needs: int | None) -> int | None:
    """Returns the largest need; None if one of them is not known."""
    known = [need for need in needs if need is not None]
    return max(known) if len(known) == len(needs) else None


def bytes_in_turn(held: Any, programs: Iterable[tuple[CompiledProgram, Any]]) -> int | None:
    """Returns the most bytes a device has while programs run one after the other beside the arrays `held`; shapes and places
    suffice. With each program are those of its arguments that are counted already; None if the compiler does not say.
    """
    beside = largest(*(program.bytes_beside(bytes_a_device(counted)) for program, counted in programs))
    return None if beside is None else bytes_a_device(held) + beside


def compile_program(function: Any, *operands: Any) -> CompiledProgram:
    """Compiles a jitted function for operands, or shapes with places; calls with such operands find this program again."""
    return lower_program(function, *operands)()


def lower_program(function: Any, *operands: Any) -> Callable[[], CompiledProgram]:
    """Lowers a jitted function as `compile_program` does; what is returned compiles it."""
    traced = function.trace(*operands)
    lowered = traced.lower()

    def placed(x: Any, place: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place, weak_type=x.weak_type)

    def compiled() -> CompiledProgram:
        program = lowered.compile()
        return CompiledProgram(program, jax.tree.map(placed, traced.out_info, program.output_shardings))

    return compiled
