"""The arithmetic of the gate: logs of runs, a session term in the standard error, one-sided bounds at planned looks.

One observation is one run (one server start). All values are natural logs oriented so that + is worse.
Welch-Satterthwaite degrees of freedom; between-session variance by the method of moments (Kalibera and Jones, ISMM
2013, T_2^2), shrunk towards a prior. scipy supplies the distributions. Sums are `math.fsum`, so that the order of runs
changes no bit of a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALPHA = 0.05
FLOOR = 0.001  # relative sd below which no difference is resolved (timer and counter ticks)
PRIOR_DF = 8.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one look knows: `theta` log ratio (+ is worse), its standard error, degrees of freedom and run counts."""

    theta: float
    se: float
    df: float
    new_runs: int
    base_runs: int
    sd: float

    def bound(self, alpha: float) -> float:
        """Half the width of the interval whose each side errs with probability `alpha`."""
        from scipy.special import stdtrit

        return float(stdtrit(self.df, 1 - alpha)) * self.se

    def p_worse(self, than: float = 0.0) -> float:
        """p-value of H0: not worse than the log ratio `than` (theta <= than)."""
        from scipy.special import stdtr

        return float(stdtr(self.df, (than - self.theta) / self.se))


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A baseline's side of the comparison: mean of its session means, variance of a run within a session (`df` degrees of
    freedom), and what a session's own shift adds to the variance of the difference."""

    mean: float
    var: float
    df: int
    runs: int
    session_var: float
    session_df: float


def log_margin(margin: float, better: str) -> float:
    """The allowed worsening as a log: ln(1+margin) where lower is better, -ln(1-margin) where higher is."""
    return math.log1p(margin) if better == "lower" else -math.log1p(-margin)


def worse_logs(values: Sequence[float], better: str) -> list[float]:
    """ln(values), negated where higher is better. Values must be positive and finite."""
    log = math.log
    return [log(v) for v in values] if better == "lower" else [-log(v) for v in values]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def mean_variance(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the variance (n-1); 0 for one value."""
    middle = math.fsum(values) / len(values)
    if len(values) < 2:
        return middle, 0.0
    return middle, math.fsum([(z - middle) ** 2 for z in values]) / (len(values) - 1)


def _session_variance(means: Sequence[float], within: float, runs_per_session: float, prior: float) -> tuple[float, float]:
    """Variance of the session effect, shrunk to `prior`^2 with PRIOR_DF, and its degrees of freedom."""
    s = len(means)
    seen = max(0.0, mean_variance(means)[1] - within / runs_per_session) if s > 1 else 0.0
    df = PRIOR_DF + s - 1
    return (PRIOR_DF * prior**2 + (s - 1) * seen) / df, df


def stored(base_sessions: Sequence[Sequence[float]], session_prior: float) -> Stored:
    """A baseline of sessions; `session_prior` is the prior sd of a session's own shift, 0 for none."""
    means = [math.fsum(s) / len(s) for s in base_sessions]
    runs, sessions = sum(map(len, base_sessions)), len(means)
    df = runs - sessions
    squares = math.fsum([(z - m) ** 2 for s, m in zip(base_sessions, means, strict=True) for z in s])
    var = squares / df if df else 0.0
    session_var, session_df = 0.0, math.inf
    if session_prior > 0:
        shift, session_df = _session_variance(means, var, runs / sessions, session_prior)
        session_var = shift * (1 + 1 / sessions)
    return Stored(mean=mean(means), var=var, df=df, runs=runs, session_var=session_var, session_df=session_df)


def session_sd(sessions: Sequence[Sequence[float]], prior: float) -> float:
    """The sd of a session's own shift, from the logs of the runs of several sessions, shrunk towards `prior`."""
    return math.sqrt(stored(sessions, prior).session_var / (1 + 1 / len(sessions)))


def compare(old: Stored, new_mean: float, new_var: float, new_runs: int) -> Estimate:
    """Mean and variance of new runs against a baseline.

    The run part of the variance is the larger of the pooled and the Welch form (pooled has the degrees of freedom that
    three runs need, Welch protects when the new build is noisier) and of the resolution floor.
    """
    k, m, df_run = old.runs, new_runs, old.df + new_runs - 1
    pooled = (old.df * old.var + (m - 1) * new_var) / df_run if df_run else 0.0
    spread = 1 / k + 1 / m
    v_run = max(pooled * spread, old.var / k + new_var / m, FLOOR**2 * spread)
    total = v_run + old.session_var
    df = total**2 / (v_run**2 / max(df_run, 1e-9) + old.session_var**2 / old.session_df)
    return Estimate(
        theta=new_mean - old.mean, se=math.sqrt(total), df=min(df, 1e6), new_runs=m, base_runs=k, sd=math.sqrt(max(pooled, FLOOR**2))
    )


def estimate(base_sessions: Sequence[Sequence[float]], new: Sequence[float], *, session_prior: float) -> Estimate:
    """Compare new runs with a baseline of sessions; all values are logs from `worse_logs`."""
    return compare(stored(base_sessions, session_prior), *mean_variance(new), len(new))


def compare_pairs(middle: float, var: float, rounds: int) -> Estimate:
    """Mean and variance of the log ratios of two arms, round by round: a session's shift is in both and cancels."""
    sd = max(math.sqrt(var), FLOOR)
    return Estimate(theta=middle, se=sd / math.sqrt(rounds), df=rounds - 1, new_runs=rounds, base_runs=rounds, sd=sd)


def p_noisier(new_var: float, new_runs: int, old: Stored) -> float:
    """p-value of the F test that new runs spread no more than those of the baseline; 1 where there is nothing to compare."""
    from scipy.special import fdtrc

    if new_runs < 2 or old.df < 1:
        return 1.0
    return float(fdtrc(new_runs - 1, old.df, new_var / max(old.var, FLOOR**2)))


def trend(values: Sequence[float]) -> tuple[float, float]:
    """The change from the first value to the last by least squares, and its two-sided p-value; (0, 1) for fewer than three."""
    from scipy.special import stdtr

    n = len(values)
    if n < 3:
        return 0.0, 1.0
    middle, centre, sxx = mean(values), (n - 1) / 2, n * (n * n - 1) / 12
    slope = math.fsum([(i - centre) * (z - middle) for i, z in enumerate(values)]) / sxx
    left = math.fsum([(z - middle - slope * (i - centre)) ** 2 for i, z in enumerate(values)]) / (n - 2)
    t = slope / math.sqrt(max(left, FLOOR**2) / sxx)
    return slope * (n - 1), 2 * float(stdtr(n - 2, -abs(t)))


LEVELS_APART = math.log(1.10)
LEVELS_SDS = 6.0  # at which noise of one level (normal, sd 7 %) is taken for two in 5 % of samples of five, 1 % of ten


def two_levels(ordered: Sequence[float]) -> int | None:
    """Where ascending values fall into two levels (the index of the first of the upper one), or None.

    They part at the widest gap that leaves each level two values; the levels' means are more than 10 % apart, and by more
    than LEVELS_SDS times the sd within them.
    """
    n = len(ordered)
    if n < 4 or ordered[-1] - ordered[0] <= LEVELS_APART:
        return None
    cut = max(range(2, n - 1), key=lambda i: ordered[i] - ordered[i - 1])
    (low, low_var), (high, high_var) = mean_variance(ordered[:cut]), mean_variance(ordered[cut:])
    within = math.sqrt(((cut - 1) * low_var + (n - cut - 1) * high_var) / (n - 2))
    return cut if high - low > max(LEVELS_APART, LEVELS_SDS * within) else None


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which of several hypotheses Holm's step-down method rejects at a family-wise error of `alpha`."""
    rejected = [False] * len(p_values)
    for left, i in zip(range(len(p_values), 0, -1), sorted(range(len(p_values)), key=p_values.__getitem__), strict=True):
        if p_values[i] > alpha / left:
            break
        rejected[i] = True
    return rejected


def benjamini_hochberg(p_values: Sequence[float], q: float) -> list[bool]:
    """Which of several hypotheses are rejected at a false discovery rate of `q` (Benjamini and Hochberg 1995)."""
    n = len(p_values)
    ordered = sorted(p_values)
    limit = max((p for rank, p in enumerate(ordered, 1) if p <= q * rank / n), default=-1.0)
    return [p <= limit for p in p_values]
