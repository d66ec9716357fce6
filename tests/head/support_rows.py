"""Rows named by given numbers of tokens, as the kernels of a support take them, and their sums in float64."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxlogp.head.support.kernels import GROUP, find_runs, weight_gradient

EDGES = (0, 1, GROUP - 1, GROUP, GROUP + 1, 0, 3 * GROUP, 2, GROUP**2, GROUP**2 + GROUP + 1, 2 * GROUP**2 - 1)
"""Numbers of tokens of a row at the edges of groups, and of groups of groups."""


class Rows(NamedTuple):
    """Places ordered by row, then by token.

    Attributes:
        source: fp32 [tokens, H].
        token: token of each place.
        dz: fp32 factor of each place.
        row: row of each place, the number of rows at the end.
    """

    source: np.ndarray
    token: np.ndarray
    dz: np.ndarray
    row: np.ndarray


def make_rows(counts, width, spare=7, seed=0) -> Rows:
    """Draws normal numbers. `spare` places at the end belong to no row."""
    rng = np.random.default_rng(seed)
    tokens, places = max(counts) + 3, sum(counts)
    chosen = [np.sort(rng.permutation(tokens)[:count]) for count in counts]
    token = np.concatenate([*chosen, np.full(spare, tokens)]).astype(np.int32)
    row = np.repeat(np.arange(len(counts) + 1), [*counts, spare]).astype(np.int32)
    dz = np.concatenate([rng.normal(size=places), np.zeros(spare)]).astype(np.float32)
    return Rows(rng.normal(size=(tokens, width)).astype(np.float32), token, dz, row)


def kernel_sums(rows: Rows, number, dtype=jnp.float32, interpret=False):
    """Sums by the kernels."""
    given = [jnp.asarray(each) for each in rows]
    source, token, dz, row = given
    return np.asarray(weight_gradient(source, token, dz, row, find_runs(row, number), dtype, interpret))


def float64_sums(rows: Rows, number) -> tuple[np.ndarray, np.ndarray]:
    """Sums in float64, and the sums of the products' magnitudes."""
    sums, magnitudes = (np.zeros((number, rows.source.shape[1])) for _ in range(2))
    live = rows.row < number
    products = rows.dz[live, None].astype(np.float64) * rows.source[rows.token[live]]
    np.add.at(sums, rows.row[live], products)
    np.add.at(magnitudes, rows.row[live], np.abs(products))
    return sums, magnitudes
