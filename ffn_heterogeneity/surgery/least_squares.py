"""Joint least squares for all removed neurons of a layer, by the smaller Gram matrix.

    Lambda = argmin |E_gone - Lambda E_rest|^2 + mu |Lambda|^2,   added to W_rest: Lambda^T W_gone

E_rest [s, p] are the survivors' incoming vectors. With p <= s (Gemma-2 2B: 4,608 of 6,912) the
matrix E_rest^T E_rest [p, p] is factored, else E_rest E_rest^T [s, s]. With mu = 0 the solution is
that of minimum norm: singular values below sqrt(max(p, s) eps) times the largest count as zero,
which is the resolution of a Gram matrix in float64.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from ffn_heterogeneity.surgery.weights import blocks

# Up to this size all eigenvalues are computed. Above it, a Cholesky factor and the two extreme
# eigenvalues are used, which is 30 times faster, unless the matrix is singular.
DIRECT = 512
_BLOCK = 1 << 21
_GONE = 256  # removed neurons whose Lambda is in memory at the same time
# Above this condition number of the Gram matrix, the residual is solved for once more.
_REFINED = 1e6

Solve = Callable[[np.ndarray], np.ndarray]


def solve_together(
    vectors: np.ndarray,
    survivors: np.ndarray,
    gone: np.ndarray,
    outgoing_rows: Callable[[np.ndarray], np.ndarray],
    ridge: float = 0.0,
) -> tuple[Callable[[slice], np.ndarray], dict]:
    """Solve for Lambda and return the update of the survivors' outgoing weights.

    Args:
      vectors: E [m, p], no entry larger than 1.
      survivors, gone: which rows are E_rest and E_gone.
      outgoing_rows: indices -> rows of W, float64.
      ridge: mu is this times the mean squared length of a row of E_rest.

    Returns:
      (slice of the survivors -> rows to add, float64; the report of `compensation`).
    """
    system = _System(vectors, survivors, ridge)
    width = outgoing_rows(survivors[:1]).shape[1]
    gained = np.zeros((system.size, width))
    squares = {"lambda": 0.0, "left": 0.0, "all": 0.0}
    largest = 0.0
    for start in range(0, len(gone), _GONE):
        some = gone[start : start + _GONE]
        wanted = vectors[some].astype(np.float64)
        y = system.solve(wanted)
        for _ in range(system.refinements):
            y += system.solve(wanted - system.combine(system.factors(y)))
        factors = system.factors(y)
        left = wanted - system.combine(factors)
        rows = outgoing_rows(some)
        for columns in blocks((width, system.size), _BLOCK):
            gained[:, columns] += y @ rows[:, columns]
        largest = max(largest, float(np.abs(factors).max()))
        for name, values in (("lambda", factors), ("left", left), ("all", wanted)):
            squares[name] += float(np.vdot(values, values))
    report = {
        "lambda_norm": math.sqrt(squares["lambda"]),
        "lambda_max": largest,
        "residual": math.sqrt(squares["left"] / squares["all"]) if squares["all"] else 0.0,
        "condition": system.condition,
    }
    return lambda block: system.rest(block) @ gained if system.wide else gained[block], report


class _System:
    """E_rest and the pseudo-inverse of its smaller Gram matrix (+ mu on the diagonal).

    Attributes:
      wide: p <= s: the matrix is E_rest^T E_rest, and Lambda^T = E_rest y; else Lambda^T = y.
      size: number of rows of the matrix.
      condition: ratio of the extreme nonzero singular values; None if all are 0.
    """

    def __init__(self, vectors: np.ndarray, survivors: np.ndarray, ridge: float):
        self.vectors, self.kept = vectors, survivors
        s, p = len(survivors), vectors.shape[1]
        self.wide = p <= s
        self.size = min(s, p)
        squares = sum(float(np.vdot(rows, rows)) for _, rows in self._parts())
        tolerance = max(s, p) * float(np.finfo(np.float64).eps)
        inverse = _pseudo_inverse(lambda: self._gram(ridge * squares / s), self.size, tolerance)
        self._invert, low, high = inverse
        self.condition = math.sqrt(high / low) if low > 0 else None
        exact = ridge == 0 and low > 0
        self.refinements = 2 if exact and high / low > _REFINED else 0

    def rest(self, block: slice) -> np.ndarray:
        """Rows of E_rest in float64."""
        return self.vectors[self.kept[block]].astype(np.float64)

    def solve(self, wanted: np.ndarray) -> np.ndarray:
        """E_gone [r, p] -> y [size, r]."""
        return self._invert(wanted.T if self.wide else self._times(wanted.T))

    def factors(self, y: np.ndarray) -> np.ndarray:
        """Lambda^T [s, r]."""
        return self._times(y) if self.wide else y

    def combine(self, factors: np.ndarray) -> np.ndarray:
        """Lambda E_rest [r, p]."""
        total = np.zeros((factors.shape[1], self.vectors.shape[1]))
        for block, rows in self._parts():
            total += factors[block].T @ rows
        return total

    def _times(self, right: np.ndarray) -> np.ndarray:
        """E_rest right."""
        product = np.empty((len(self.kept), right.shape[1]))
        for block, rows in self._parts():
            np.matmul(rows, right, out=product[block])
        return product

    def _parts(self) -> Iterator[tuple[slice, np.ndarray]]:
        for block in blocks((len(self.kept), self.vectors.shape[1]), _BLOCK):
            yield block, self.rest(block)

    def _gram(self, added: float) -> np.ndarray:
        """Upper triangle of the matrix with `added` on its diagonal; the rest is 0."""
        from scipy.linalg.blas import dsyrk

        gram = np.zeros((self.size, self.size), order="F")
        if self.wide:
            parts = (rows.T for _, rows in self._parts())
        else:
            columns = blocks((self.vectors.shape[1], self.size), _BLOCK)
            parts = (self.vectors[self.kept, some].astype(np.float64) for some in columns)
        for block in parts:
            gram = dsyrk(1.0, block, beta=1.0, c=gram, overwrite_c=True)
        gram[np.diag_indices(self.size)] += added
        return gram


def _pseudo_inverse(
    make: Callable[[], np.ndarray], size: int, tolerance: float
) -> tuple[Solve, float, float]:
    """(x -> gram^+ x, least and largest nonzero eigenvalue) of the matrix that `make` returns.

    Args:
      make: returns the upper triangle; called again in the rare case that the matrix is singular.
      tolerance: eigenvalues below it times the largest count as zero.
    """
    if size > DIRECT:
        inverse = _cholesky(make(), tolerance)
        if inverse is not None:
            return inverse
    values, basis = np.linalg.eigh(make(), UPLO="U")
    count = values > tolerance * max(values[-1], 0.0)
    if not count.any():
        return np.zeros_like, 0.0, 0.0
    values, basis = values[count], basis[:, count]
    return lambda x: basis @ ((basis.T @ x) / values[:, None]), float(values[0]), float(values[-1])


def _cholesky(gram: np.ndarray, tolerance: float) -> tuple[Solve, float, float] | None:
    """`_pseudo_inverse` of a nonsingular matrix; None if the matrix is singular.

    `gram` is overwritten.
    """
    from scipy.linalg import LinAlgError, cho_factor, cho_solve
    from scipy.linalg.blas import dsymv
    from scipy.sparse.linalg import LinearOperator, eigsh

    start = np.random.default_rng(0).normal(size=len(gram))

    def largest(multiply: Solve) -> float:
        # Scipy's class creates an object with another signature.
        operator = LinearOperator(gram.shape, multiply, dtype=np.float64)  # pyright: ignore[reportCallIssue]
        return float(eigsh(operator, 1, v0=start, tol=1e-4, return_eigenvectors=False)[0])

    high = largest(lambda x: dsymv(1.0, gram, x))
    try:
        factor = cho_factor(gram, overwrite_a=True, check_finite=False)
        low = 1 / largest(lambda x: cho_solve(factor, x, check_finite=False))
    except LinAlgError:
        return None
    if low <= tolerance * high:
        return None
    return lambda x: cho_solve(factor, x, check_finite=False), low, high
