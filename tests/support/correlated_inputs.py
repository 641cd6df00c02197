"""A weight with the Hessian of correlated inputs."""

from __future__ import annotations

import numpy as np


def problem(n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A weight and the Hessian of correlated inputs of very different sizes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4 * k, k)) @ (rng.standard_normal((k, k)) / np.sqrt(k) + np.eye(k))
    x *= np.exp(0.7 * rng.standard_normal(k))
    return (rng.standard_t(5, (n, k)) * 0.02).astype(np.float32), x.T @ x
