"""Rotary position embedding: angles from positions, and the rotation of queries and keys."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlogp.errors import require


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama-3's stretch of the slow frequencies, with the names and defaults of its configuration.

    Frequencies whose wavelength is longer than `original_max_position_embeddings / low_freq_factor` are divided by `factor`,
    at least 1, those shorter than `original_max_position_embeddings / high_freq_factor` stay, and between the two the
    divisor is interpolated. Lengths are in tokens, and `high_freq_factor` is larger than `low_freq_factor`.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        require(1.0 <= self.factor < math.inf, "rope_scaling.factor", "a finite number of at least 1", self.factor)
        above = self.low_freq_factor < self.high_freq_factor < math.inf
        require(above, "rope_scaling.high_freq_factor", f"more than {self.low_freq_factor}", self.high_freq_factor)

    def stretch(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns the stretched frequencies, radians per position."""
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return kept * frequencies + (1.0 - kept) * frequencies / self.factor


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by the same factor, at least 1, so that positions count less."""

    factor: float

    def __post_init__(self) -> None:
        require(1.0 <= self.factor < math.inf, "rope_scaling.factor", "a finite number of at least 1", self.factor)

    def stretch(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


RopeScaling = Llama3Scaling | LinearScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Returns each pair's angle per position, float64 [head_dim / 2] in radians: f_i = theta^(-2i / head_dim), stretched.

    Example:
        >>> rope_frequencies(4, 10000.0).tolist()
        [1.0, 0.01]
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return frequencies if scaling is None else scaling.stretch(frequencies)


def rope_tables(
    positions: Int[Array, "*tokens"], frequencies: np.ndarray
) -> tuple[Float[Array, "*tokens 1 half"], Float[Array, "*tokens 1 half"]]:
    """Returns cosine and sine of position times frequency, in fp32, with an axis of size 1 in the place of the heads."""
    angles = positions[..., None, None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    features: Float[Array, "*tokens heads head_dim"],
    tables: tuple[Float[Array, "*tokens 1 half"], Float[Array, "*tokens 1 half"]],
) -> Float[Array, "*tokens heads head_dim"]:
    """Rotates feature i against feature i + head_dim / 2 by the token's angle; fp32 inside."""
    cos, sin = tables
    first, second = jnp.split(features.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(features.dtype)
