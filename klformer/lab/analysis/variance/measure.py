"""How much of a model's output is chance: the paper's measures over many draws of the frequencies.

For an example with scores s_1 .. s_n (n draws, K classes):

    RSD  relative standard deviation: deviation of the output over the draws / |its mean|
    PI   prediction inconsistency: draws whose label is not the most frequent one, in percent of n
    VA   accuracy of the most frequent label (vote); AGV = VA / mean accuracy of a single draw

The paper has two classes, where the output is one number, s_2 - s_1. With more classes the output is the vector of the
scores less their mean, and RSD = sqrt(trace Cov) / |mean|: the same number for two classes, and as there it does not
change when all scores are multiplied by a constant or a constant is added to them.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class VarianceMetrics:
    """The measures of one run."""

    #: Mean and median over the examples. The mean is the paper's; a few examples near the decision can dominate it.
    rsd: float
    rsd_median: float
    #: Percent of the draws, mean over the examples.
    pi: float
    agv: float
    accuracy: float
    voting_accuracy: float


def relative_standard_deviation(scores: FloatArray) -> FloatArray:
    """Return the RSD of scores (draws, N, K) as (N,). Infinite where the mean output is 0 and the draws differ, 0 where
    nothing differs."""
    centred = scores - scores.mean(axis=-1, keepdims=True)
    deviation = np.sqrt(centred.var(axis=0).sum(axis=-1))
    size = np.linalg.norm(centred.mean(axis=0), axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(deviation == 0, 0.0, deviation / size)


def prediction_inconsistency(scores: FloatArray) -> FloatArray:
    """Return the percent (N,) of the draws (draws, N, K) that do not give the most frequent label."""
    votes = count_votes(scores)
    return 100 * (1 - votes.max(axis=-1) / len(scores))


def count_votes(scores: FloatArray) -> npt.NDArray[np.int64]:
    """Count how often each label is the predicted one: (draws, N, K) -> (N, K)."""
    labels = scores.argmax(axis=-1)
    return np.stack([(labels == label).sum(axis=0) for label in range(scores.shape[-1])], axis=-1)


def variance_metrics(scores: FloatArray, labels: npt.NDArray[np.int64]) -> VarianceMetrics:
    """Return all measures from scores (draws, N, K) and the true labels (N,)."""
    rsd = relative_standard_deviation(scores)
    accuracy = float((scores.argmax(axis=-1) == labels).mean())
    voting = float((count_votes(scores).argmax(axis=-1) == labels).mean())
    return VarianceMetrics(
        rsd=float(rsd.mean()),
        rsd_median=float(np.median(rsd)),
        pi=float(prediction_inconsistency(scores).mean()),
        agv=voting / accuracy if accuracy else float("nan"),
        accuracy=accuracy,
        voting_accuracy=voting,
    )


def r_squared(x: FloatArray, y: FloatArray) -> float:
    """Return the squared correlation of two measures over several runs.

    nan for less than three runs, if one of the measures is the same for all, or if a number is not finite.
    """
    usable = len(x) >= 3 and np.isfinite(x).all() and np.isfinite(y).all()
    if not usable or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1] ** 2)
