"""Invariance check: runs any log-prob function under changes that must not matter, and compares bytes.

The function may come from anywhere: your own trainer, Tunix, MaxText. It takes hidden states, head weight and targets
and returns a value (or a vector, such as a gradient) for each token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from jaxlogp._arrays import AnyArray
from jaxlogp.errors import describe, is_concrete, is_positive_integer, require, require_floating, require_integer
from jaxlogp.invariance.processes import run_in_processes

TokenFunction = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Difference(NamedTuple):
    """The effect of one change on the tokens that both runs share.

    Attributes:
        change: name of the change.
        num_tokens: number of tokens compared.
        num_differing: number of tokens with at least one differing byte.
        num_non_finite: number of tokens with a NaN or an infinity in either run. They never count as equal: NaN has the
            same bytes as NaN whatever went wrong.
        max_ulps: largest distance in units in the last place; None if a value is NaN on one side only.
        worst_token: position, in the unchanged batch, of the token with the largest distance; None if all are equal.
        value: value with the largest difference, after the change.
        reference: the same value before the change.
        reason: reason why the change was not run; None if it was.
    """

    change: str
    num_tokens: int
    num_differing: int
    num_non_finite: int
    max_ulps: int | None
    worst_token: int | None
    value: float | None
    reference: float | None
    reason: str | None = None

    @property
    def equal(self) -> bool:
        """Whether the change was run, all bytes are equal and all values are finite."""
        return self.reason is None and self.num_differing == self.num_non_finite == 0


def _not_run(change: str, reason: str) -> Difference:
    return Difference(change, 0, 0, 0, None, None, None, None, reason)


class InvarianceReport(NamedTuple):
    """The effects of all changes.

    Attributes:
        name: title of the report.
        differences: one `Difference` for each change.
        num_non_finite: number of tokens of the unchanged batch whose result is NaN or infinite.
        first_non_finite: position of the first such token, or None.
    """

    name: str
    differences: tuple[Difference, ...]
    num_non_finite: int = 0
    first_non_finite: int | None = None

    @property
    def broken(self) -> tuple[str, ...]:
        """Changes that were run and changed a byte or gave a non-finite result."""
        return tuple(d.change for d in self.differences if d.reason is None and not d.equal)

    @property
    def not_run(self) -> tuple[str, ...]:
        """Changes that could not be run."""
        return tuple(d.change for d in self.differences if d.reason is not None)

    def __str__(self) -> str:
        """Returns the table and its summary; non-finite results come first."""
        lines = [f"{self.name}"]
        if self.num_non_finite:
            lines.append(
                f"NOT FINITE: {self.num_non_finite} tokens of the unchanged batch, first {self.first_non_finite}"
            )
        lines.append(f"{'change':<34} {'equal':<6} {'differing':>13} {'not finite':>10} {'max ulp':>9}  worst token")
        for d in self.differences:
            if d.reason is not None:
                lines.append(f"{d.change:<34} NOT RUN: {d.reason}")
                continue
            worst = "" if d.worst_token is None else f"{d.worst_token}: {d.value:.9g}, was {d.reference:.9g}"
            ulps = "NaN" if d.max_ulps is None else str(d.max_ulps)
            counts = f"{f'{d.num_differing}/{d.num_tokens}':>13} {d.num_non_finite:>10}"
            lines.append(f"{d.change:<34} {'yes' if d.equal else 'NO':<6} {counts} {ulps:>9}  {worst}".rstrip())
        ran = len(self.differences) - len(self.not_run)
        differing = sum(d.num_differing > 0 for d in self.differences)
        lines.append(f"{differing} of {ran} changes made a difference; {len(self.not_run)} not run")
        return "\n".join(lines)


class _Batch(NamedTuple):
    """Tokens to run, and their positions in the unchanged batch."""

    hidden: np.ndarray
    targets: np.ndarray
    places: np.ndarray
    sources: np.ndarray


def check_invariance(
    function: TokenFunction,
    hidden: Float[AnyArray, "tokens hidden"],
    weight: Float[AnyArray, "vocab hidden"],
    targets: Int[AnyArray, " tokens"],
    *,
    name: str = "log-probs",
    sharded: Mapping[int, TokenFunction] | None = None,
    num_shards: Sequence[int] = (2, 4),
    chunk: int = 7,
    path: str | None = None,
) -> InvarianceReport:
    """Runs ``function`` under changes of batch, position, padding, order, neighbors, chunk, program and mesh.

    Each change leaves some tokens as they are; their results must have the same bytes as in the unchanged run. Equal
    means equal bytes: -0.0 differs from 0.0. Non-finite results are reported and never count as equal.

    The programs: without jit; under ``jax.vmap``, two batches at a time; and the gradient of Σ function with respect to
    the hidden states under ``jax.checkpoint``, against the gradient without it (only for functions with one value per
    token: a vector may already be a gradient). A function that JAX cannot map or differentiate is reported as not run
    under these.

    Args:
        function: (hidden [n, H], weight [V, H], targets [n]) -> [n] or [n, ...], for any n; differentiable or not. It is
            compiled by ``jax.jit`` here.
        hidden: [tokens, H], at least 8 tokens.
        weight: [V, H].
        targets: [tokens], ids in [0, V).
        name: title of the report.
        sharded: functions for a vocabulary sharded over n devices, by n. For a missing n, `function` itself runs under
            ``jax.jit`` with the rows of the weight placed over a mesh, so that the compiler partitions it.
        num_shards: numbers of devices over which to shard the vocabulary; a number that the machine lacks is reported as
            not run.
        chunk: tokens per chunk for the change "in chunks".
        path: "module:function" of the function for a vocabulary over all devices, to be run in two processes with four
            simulated devices each (:func:`jaxlogp.invariance.processes.run_in_processes`); None omits this change.

    Returns:
        The report; ``print`` it.

    Raises:
        ValueError: if a shape, dtype or size differs from the above, or ``function`` does not return a value per token.

    Example:
        >>> rows = jax.random.normal(jax.random.key(0), (16, 8))
        >>> report = check_invariance(lambda h, w, t: w[t, 0] * h[:, 0], rows, rows, jnp.arange(16), num_shards=())
        >>> report.broken
        ()
    """
    hidden, weight, targets = _checked(hidden, weight, targets, chunk)
    compiled = jax.jit(function)

    def values(run: TokenFunction, hidden: np.ndarray, targets: np.ndarray) -> np.ndarray:
        result = np.asarray(run(jnp.asarray(hidden), jnp.asarray(weight), jnp.asarray(targets)))
        ok = result.shape[:1] == targets.shape and jnp.issubdtype(result.dtype, jnp.floating)
        require(ok, "function", f"a floating-point result of shape [{len(targets)}, ...]", describe(result))
        return result

    wanted = values(compiled, hidden, targets)
    differences = []
    for change, batch in _changes(hidden, targets).items():
        seen = values(compiled, batch.hidden, batch.targets)
        differences.append(compare_bits(change, seen[batch.places], wanted[batch.sources], batch.sources))
    everyone = np.arange(len(targets))
    chunks = [
        values(compiled, hidden[at : at + chunk], targets[at : at + chunk]) for at in range(0, len(targets), chunk)
    ]
    differences.append(compare_bits(f"in chunks of {chunk}", np.concatenate(chunks), wanted, everyone))
    differences.append(compare_bits("without jit", values(function, hidden, targets), wanted, everyone))
    differences.append(_under_vmap(function, hidden, weight, targets, wanted))
    if wanted.ndim == 1:
        differences.append(_under_checkpoint(function, hidden, weight, targets))
    for size in num_shards:
        change, available = f"vocabulary over {size} devices", len(jax.devices())
        if size > available:
            reason = f"{available} {jax.devices()[0].platform} device(s)"
            differences.append(_not_run(change, reason))
            continue
        given = (sharded or {}).get(size)
        run = _placed(compiled, size) if given is None else jax.jit(given)
        differences.append(compare_bits(change, values(run, hidden, targets), wanted, everyone))
    if path is not None:
        seen = run_in_processes(path, hidden, weight, targets)
        differences.append(compare_bits("two processes of 4 devices", seen, wanted, everyone))
    broken = np.flatnonzero(_non_finite(wanted).any(axis=1))
    return InvarianceReport(name, tuple(differences), len(broken), int(broken[0]) if len(broken) else None)


def _under_vmap(
    function: TokenFunction, hidden: np.ndarray, weight: np.ndarray, targets: np.ndarray, wanted: np.ndarray
) -> Difference:
    """Runs the batch and its reverse in one call."""
    mapped = jax.jit(jax.vmap(function, in_axes=(0, None, 0)))
    batches, ids = (jnp.asarray(np.stack([x, x[::-1]])) for x in (hidden, targets))
    try:
        seen = np.asarray(mapped(batches, jnp.asarray(weight), ids))
    except (TypeError, ValueError, NotImplementedError) as error:
        return _not_run("under jax.vmap", _first_line(error))
    return compare_bits("under jax.vmap", seen[0], wanted, np.arange(len(targets)))


def _under_checkpoint(
    function: TokenFunction, hidden: np.ndarray, weight: np.ndarray, targets: np.ndarray
) -> Difference:
    """Computes the gradient of Σ function with respect to the hidden states; the backward recomputes the forward."""
    change = "gradient under jax.checkpoint"

    def gradient(inner: TokenFunction) -> np.ndarray:
        run = jax.jit(jax.grad(lambda *arrays: jnp.sum(inner(*arrays)).astype(jnp.float32)))
        return np.asarray(run(*(jnp.asarray(x) for x in (hidden, weight, targets))))

    try:
        seen, wanted = gradient(jax.checkpoint(function)), gradient(function)
    except (TypeError, ValueError, NotImplementedError) as error:
        return _not_run(change, _first_line(error))
    return compare_bits(change, seen, wanted, np.arange(len(targets)))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _checked(hidden: AnyArray, weight: AnyArray, targets: AnyArray, chunk: int) -> tuple[np.ndarray, ...]:
    require_floating(hidden, "hidden")
    require_floating(weight, "weight")
    require_integer(targets, "targets")
    require(
        hidden.ndim == 2 and len(hidden) >= 8, "hidden", "shape [tokens, H] with 8 tokens or more", describe(hidden)
    )
    fits = weight.ndim == 2 and weight.shape[1] == hidden.shape[1]
    require(fits, "weight", f"shape [V, {hidden.shape[1]}]", describe(weight))
    require(targets.shape == hidden.shape[:1], "targets", f"shape {hidden.shape[:1]}", describe(targets))
    require(is_concrete(hidden, weight, targets), "hidden, weight, targets", "known values", "traced arrays")
    require(is_positive_integer(chunk), "chunk", "an integer > 0", chunk)
    return np.asarray(hidden), np.asarray(weight), np.asarray(targets)


def _changes(hidden: np.ndarray, targets: np.ndarray) -> dict[str, _Batch]:
    """Returns the changes of the batch; the other tokens of a batch are real data, taken from the batch itself."""
    count = len(targets)
    everyone, half = np.arange(count), np.arange(count // 2)
    order = np.random.default_rng(0).permutation(count)

    def rows(selected: np.ndarray) -> _Batch:
        return _Batch(hidden[selected], targets[selected], np.arange(len(selected)), selected)

    def among(others: np.ndarray, other_targets: np.ndarray) -> _Batch:
        changed, ids = hidden.copy(), targets.copy()
        changed[count // 2 :], ids[count // 2 :] = others, other_targets
        return _Batch(changed, ids, half, half)

    def padded(before: int, after: int) -> _Batch:
        zeros = [np.zeros((size, hidden.shape[1]), hidden.dtype) for size in (before, after)]
        ids = np.pad(targets, [(before, after)])
        return _Batch(np.concatenate([zeros[0], hidden, zeros[1]]), ids, everyone + before, everyone)

    rest = hidden[count // 2 :], targets[count // 2 :]
    return {
        "run again": rows(everyone),
        "the first half alone": rows(half),
        "three tokens": rows(everyone[2:5]),
        "one token": rows(everyone[3:4]),
        "rotated by one": rows(np.roll(everyone, 1)),
        "reversed": rows(everyone[::-1]),
        "permuted": rows(order),
        "every token twice": rows(np.tile(everyone, 2)),
        "zeros after": padded(0, 5),
        "zeros before": padded(3, 0),
        "others 1000 times larger": among(rest[0] * np.asarray(1000, hidden.dtype), rest[1]),
        "others the same token": among(np.broadcast_to(hidden[0], rest[0].shape), np.full_like(rest[1], targets[0])),
        "others NaN": among(np.full_like(rest[0], np.nan), rest[1]),
    }


def _placed(compiled: TokenFunction, size: int) -> TokenFunction:
    """Returns ``compiled`` with the weight's rows over ``size`` devices, so that the compiler partitions the function."""
    mesh = jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
    whole, split = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("tensor")))

    def run(hidden, weight, targets):
        expected = f"a number of rows that {size} devices divide, or an entry {size} in sharded"
        require(weight.shape[0] % size == 0, "weight", expected, describe(weight))
        return compiled(jax.device_put(hidden, whole), jax.device_put(weight, split), jax.device_put(targets, whole))

    return run


def compare_bits(change: str, seen: np.ndarray, wanted: np.ndarray, sources: np.ndarray) -> Difference:
    """Compares the bytes of the same tokens in two runs.

    Args:
        change: name of the change between them.
        seen: [tokens, ...], results after the change.
        wanted: [tokens, ...], results before the change, of the same dtype.
        sources: [tokens], positions of the tokens in the unchanged batch.

    Returns:
        The difference; distances are in units of the results' own dtype.

    Raises:
        ValueError: if shapes or dtypes differ.
    """
    same = seen.shape == wanted.shape and seen.dtype == wanted.dtype
    require(same, "function", f"{describe(wanted)} again", describe(seen))
    flat, reference = (np.ascontiguousarray(x).reshape(len(sources), -1) for x in (seen, wanted))
    bits = f"u{flat.dtype.itemsize}"
    differs = flat.view(bits) != reference.view(bits)
    tokens = differs.any(axis=1)
    non_finite = int((_non_finite(flat) | _non_finite(reference)).any(axis=1).sum())
    if not tokens.any():
        return Difference(change, len(sources), 0, non_finite, 0, None, None, None)
    nans = [np.isnan(x.astype(np.float64)) for x in (flat, reference)]
    distance = np.where(nans[0] & nans[1], 0, _distance(flat, reference))
    # NaN against a number is the largest difference; zeros of different sign and NaNs of different payload have
    # distance 0.
    one_nan = nans[0] != nans[1]
    rank = np.where(one_nan, np.iinfo(np.uint64).max, np.where(differs, np.maximum(distance, 1), 0))
    row, column = np.unravel_index(int(np.argmax(rank)), rank.shape)
    values = float(flat[row, column]), float(reference[row, column])
    ulps = None if one_nan.any() else int(distance.max())
    return Difference(change, len(sources), int(tokens.sum()), non_finite, ulps, int(sources[row]), *values)


def _non_finite(values: np.ndarray) -> np.ndarray:
    """Returns [tokens, values], True where a value is NaN or infinite."""
    return ~np.isfinite(values.reshape(len(values), -1).astype(np.float64))


def _distance(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Counts the floats between two floats, uint64; -0.0 and 0.0 are the same float."""
    size = left.dtype.itemsize
    bits = (values.view(f"i{size}").astype(np.int64) for values in (left, right))
    ours, theirs = (np.where(x < 0, -(x & np.int64(2 ** (8 * size - 1) - 1)), x) for x in bits)
    # Unsigned, as the difference of two float64 may pass 2^63.
    return np.maximum(ours, theirs).astype(np.uint64) - np.minimum(ours, theirs).astype(np.uint64)
