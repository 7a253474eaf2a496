"""k-means of neurons against scikit-learn's, from the same start and from separate starts."""

import time

import jax
import numpy as np
import pytest
from sklearn.cluster import KMeans
from tiny_runs import refused

from ffn_heterogeneity.surgery import kmeans
from ffn_heterogeneity.surgery.kmeans import cluster

RNG = np.random.default_rng(0)
POINTS = (RNG.normal(size=(240, 50)) * RNG.gamma(2, 1, size=(240, 1))).astype(np.float32)
BOTH = pytest.mark.parametrize("products", [False, True])


@BOTH
@pytest.mark.parametrize("c", [1, 5, 60, 180, 240])
def test_lloyd_ends_where_scikit_learns_does(c, products):
    seeds = RNG.choice(len(POINTS), c, replace=False)
    theirs = KMeans(c, init=POINTS[seeds], n_init=1, tol=0, max_iter=300).fit(POINTS)
    ours = cluster(POINTS, c, seeds=seeds, tolerance=0.0, products=products)
    assert ours.inertia == pytest.approx(theirs.inertia_, rel=1e-5, abs=1e-6)
    np.testing.assert_array_equal(ours.labels, theirs.labels_)
    np.testing.assert_allclose(ours.centroids, theirs.cluster_centers_, atol=1e-5)


def test_the_tolerance_is_scikit_learns():
    seeds = RNG.choice(len(POINTS), 5, replace=False)
    for tolerance in (0.3, 0.03):
        theirs = KMeans(5, init=POINTS[seeds], n_init=1, tol=tolerance).fit(POINTS)
        assert cluster(POINTS, 5, seeds=seeds, tolerance=tolerance).steps == theirs.n_iter_


@BOTH
def test_starts_are_as_good_as_scikit_learns(products):
    """Its greedy k-means++, over draws; plain seeding by squared distance ends higher."""
    theirs = [KMeans(60, n_init=1, random_state=i).fit(POINTS).inertia_ for i in range(20)]
    ours = [cluster(POINTS, 60, seed=i, products=products).inertia for i in range(20)]
    assert np.mean(ours) == pytest.approx(np.mean(theirs), rel=0.005)
    drawn = [RNG.choice(len(POINTS), 60, replace=False) for _ in range(20)]
    chance = [cluster(POINTS, 60, seeds=seeds, products=products).inertia for seeds in drawn]
    assert np.mean(ours) < 0.98 * np.mean(chance)


def test_the_best_of_several_starts_is_kept_and_one_start_is_the_first():
    one, many = (cluster(POINTS, 60, starts=n, seed=3) for n in (1, 8))
    assert many.inertia < one.inertia
    again = cluster(POINTS, 60, starts=8, seed=3)
    np.testing.assert_array_equal(many.labels, again.labels)
    apart = POINTS - many.centroids[many.labels]
    assert many.inertia == pytest.approx(np.sum(apart.astype(np.float64) ** 2), rel=1e-12)
    assert many.share == pytest.approx(many.inertia / np.sum(POINTS.astype(np.float64) ** 2))


def test_products_of_pairs_are_made_once_for_all_starts(monkeypatch):
    made, gram = [], kmeans._gram
    monkeypatch.setattr(kmeans, "_gram", lambda *given: made.append(1) or gram(*given))
    cluster(POINTS, 60, starts=5)
    assert made == [1]


@BOTH
def test_duplicates_stay_duplicates(products):
    """All copies are in one cluster, of any size, whose centroid is exactly the point."""
    times = np.arange(40) % 7 + 1
    points = np.repeat(POINTS[:40], times, axis=0)[RNG.permutation(times.sum())]
    clusters = cluster(points, 40, products=products)
    assert clusters.inertia == 0 and sorted(clusters.sizes) == sorted(times)
    np.testing.assert_array_equal(clusters.centroids[clusters.labels], points.astype(np.float64))


@BOTH
@pytest.mark.parametrize("c", [41, 100, 160])
def test_more_clusters_than_unlike_points_are_none_of_them_empty(c, products):
    points = np.repeat(POINTS[:40], 4, axis=0)
    clusters = cluster(points, c, products=products)
    assert clusters.sizes.min() >= 1 and clusters.sizes.sum() == 160 and clusters.inertia == 0


def test_an_empty_cluster_takes_the_farthest_point():
    """Two seeds are the same point: the cluster of the second is empty."""
    points = np.array([[0.0], [0.0], [1.0], [9.0]], np.float32)
    clusters = cluster(points, 2, seeds=np.array([0, 1]), tolerance=0.0)
    assert clusters.labels[3] != clusters.labels[0] and sorted(clusters.sizes) == [1, 3]


@BOTH
@pytest.mark.parametrize("exponent", [-140, 126])
def test_tiny_and_huge_weights(exponent, products):
    scaled = np.ldexp(POINTS.astype(np.float64), exponent)
    clusters = cluster(scaled, 60, products=products)
    np.testing.assert_array_equal(clusters.labels, cluster(POINTS, 60, products=products).labels)


def test_the_mean_of_huge_float32_weights_does_not_overflow():
    huge = np.ldexp(np.abs(POINTS), 123)
    clusters = cluster(huge, 60, seed=2)
    np.testing.assert_array_equal(clusters.labels, cluster(np.abs(POINTS), 60, seed=2).labels)


def test_what_cannot_be_clustered_is_refused():
    for c in (0, 241):
        refused(f"{c} clusters of 240 neurons: choose 1 to 240", cluster, POINTS, c)
    for bad in (np.nan, np.inf):
        refused("NaN or infinite", cluster, np.where(POINTS[3, 3] == POINTS, bad, POINTS), 5)
    zeros = cluster(np.zeros((6, 2), np.float32), 3)
    assert zeros.inertia == zeros.share == 0 and zeros.sizes.min() == 1


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_copies_of_points_close_together_are_never_split(products, seed):
    """Twelve points that differ in five millionths of their squares, thirty copies of each:
    copies are at distance 0, whatever rounding makes of it."""
    rng = np.random.default_rng(seed)
    apart = rng.normal(size=(12, 257))
    apart *= np.sqrt(2.5e-6) / np.linalg.norm(apart, axis=1, keepdims=True)
    which = rng.permutation(np.repeat(np.arange(12), 30))
    points = (np.ones(257) / np.sqrt(257) + apart)[which].astype(np.float32)
    clusters = cluster(points, 12, seed=seed, products=products)
    assert sorted(clusters.sizes) == [30] * 12
    assert len({(label, point) for label, point in zip(clusters.labels, which, strict=True)}) == 12


@pytest.mark.parametrize("seed", range(3))
def test_no_copy_is_drawn_while_another_point_is_left(seed):
    """Two points of 600 copies each and ten near one of them, at five millionths of the squares:
    what rounding makes of the copies' distances adds up to more than theirs."""
    rng, times = np.random.default_rng(seed), [600] * 2 + [1] * 10
    unlike = rng.normal(size=(12, 257))
    unlike *= np.sqrt(2.5e-6) / np.linalg.norm(unlike, axis=1, keepdims=True)
    unlike += np.where(np.arange(12)[:, None] == 1, -1, 1) / np.sqrt(257)
    which = rng.permutation(np.repeat(np.arange(12), times))
    points = unlike[which].astype(np.float32)
    drawn = kmeans._spread(points, jax.random.key(seed), 12, products=True)
    assert len({*which[np.asarray(drawn)].tolist()}) == 12


def test_points_far_from_the_origin():
    """Clusters of points with a large common part, which is subtracted before float32 squares."""
    far = POINTS.astype(np.float64) + 1e4
    clusters = cluster(far, 60, seed=2)
    np.testing.assert_array_equal(clusters.labels, cluster(POINTS, 60, seed=2).labels)
    np.testing.assert_allclose(
        clusters.centroids - 1e4, cluster(POINTS, 60, seed=2).centroids, atol=1e-9
    )


@pytest.mark.slow
def test_faster_than_scikit_learn(capsys):
    """At the size of a RoBERTa layer, in float32, both with all cores, without compilation."""
    points = RNG.normal(size=(3072, 1537)) * RNG.gamma(2, 1, size=(3072, 1))
    points = points.astype(np.float32)

    def timed(function, *given):
        start = time.perf_counter()
        result = function(*given)
        return result, time.perf_counter() - start

    cluster(points, 768)
    theirs = [timed(KMeans(768, n_init=1, random_state=i).fit, points) for i in range(3)]
    ours = [timed(lambda i=i: cluster(points, 768, seed=i)) for i in range(3)]
    _, thirty = timed(lambda: cluster(points, 768, starts=30))
    seconds = [np.median([time for _, time in each]) for each in (theirs, ours)]
    with capsys.disabled():
        print("\nscikit-learn {:.2f} s, ours {:.2f} s; 30 starts".format(*seconds), thirty)
    assert seconds[0] > 10 * seconds[1] and thirty < seconds[0]
    means = [np.mean([x.inertia_ for x, _ in theirs]), np.mean([x.inertia for x, _ in ours])]
    assert means[1] == pytest.approx(means[0], rel=0.005)
