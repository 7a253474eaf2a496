"""Groups of similar experts: those of M-SMoE and of REAM; see `merge_experts`."""

from typing import NamedTuple

import numpy as np

from ffn_heterogeneity.surgery.expert_text import Seen


class ExpertGroups(NamedTuple):
    """Columns of each group, the dominant one first; and the similarity of columns [R, R]."""

    columns: list[list[int]]
    similarity: np.ndarray


def cosines(gram: np.ndarray) -> np.ndarray:
    """Return the cosines of vectors with these inner products, [R, R]; 0 for zero vectors."""
    norms = np.sqrt(np.diag(gram))
    product = norms[:, None] * norms
    return np.divide(gram, product, out=np.zeros_like(product), where=product > 0)


def m_smoe_groups(seen: Seen, left: int) -> ExpertGroups:
    """Group every expert with the most similar of the `left` most used ones."""
    similarity = (cosines(seen.logits) + 1) / 2
    dominant = np.sort(np.argsort(-seen.usage, kind="stable")[:left])
    groups = {int(column): [int(column)] for column in dominant}
    for column in range(len(seen.usage)):
        if column not in groups:
            groups[int(dominant[np.argmax(similarity[column, dominant])])].append(column)
    return ExpertGroups(list(groups.values()), similarity)


def ream_groups(seen: Seen, left: int, size: int) -> ExpertGroups:
    """Group with each centroid, from the highest score down, its `size` most similar free experts.

    Groups are sorted by the centroid's number.
    """
    similarity = (cosines(seen.logits) + cosines(seen.outputs)) / 2
    centroids = np.argsort(-seen.scores, kind="stable")[:left]
    free, groups = set(range(len(seen.scores))) - set(centroids.tolist()), {}
    for centroid in centroids.tolist():
        nearest = sorted(free, key=lambda column: (-similarity[centroid, column], column))[:size]
        groups[centroid] = [centroid, *nearest]
        free -= set(nearest)
    return ExpertGroups([groups[centroid] for centroid in sorted(groups)], similarity)
