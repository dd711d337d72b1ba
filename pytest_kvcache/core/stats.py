"""The arithmetic of the gate: logs of runs, a session term in the standard error, one-sided bounds at planned looks.

One observation is one run (one server start). All values are natural logs oriented so that + is worse.
Welch-Satterthwaite degrees of freedom; between-session variance by the method of moments (Kalibera and Jones, ISMM
2013, T_2^2), shrunk towards a prior. scipy supplies the t distribution.
"""

from __future__ import annotations

import math
import statistics
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

    def p_worse(self) -> float:
        """p-value of H0: not worse (theta <= 0)."""
        from scipy.special import stdtr

        return float(stdtr(self.df, -self.theta / self.se))


def log_margin(margin: float, better: str) -> float:
    """The allowed worsening as a log: ln(1+margin) where lower is better, -ln(1-margin) where higher is."""
    return math.log1p(margin) if better == "lower" else -math.log1p(-margin)


def worse_logs(values: Sequence[float], better: str) -> list[float]:
    """ln(values), negated where higher is better. Values must be positive and finite."""
    sign = 1.0 if better == "lower" else -1.0
    return [sign * math.log(v) for v in values]


def _variance(values: Sequence[float]) -> float:
    return statistics.variance(values) if len(values) > 1 else 0.0


def _session_variance(means: Sequence[float], within: float, runs_per_session: float, prior: float) -> tuple[float, float]:
    """Variance of the session effect, shrunk to `prior`^2 with PRIOR_DF, and its degrees of freedom."""
    s = len(means)
    seen = max(0.0, _variance(means) - within / runs_per_session) if s > 1 else 0.0
    df = PRIOR_DF + s - 1
    return (PRIOR_DF * prior**2 + (s - 1) * seen) / df, df


def estimate(base_sessions: Sequence[Sequence[float]], new: Sequence[float], *, session_prior: float) -> Estimate:
    """Compare new runs with a baseline of sessions; all values are logs from `worse_logs`.

    The run part of the variance is the larger of the pooled and the Welch form (pooled has the degrees of freedom that
    three runs need, Welch protects when the new build is noisier) and of the resolution floor.
    `session_prior` is the prior sd of a session's own shift; 0 where base and new runs were interleaved.
    """
    means = [statistics.fmean(s) for s in base_sessions]
    k, m, sessions = sum(map(len, base_sessions)), len(new), len(means)
    df_base, df_new = k - sessions, m - 1
    squares = sum((z - mean) ** 2 for s, mean in zip(base_sessions, means, strict=True) for z in s)
    base_var = squares / df_base if df_base else 0.0
    new_var = _variance(new)
    df_run = df_base + df_new
    pooled = (df_base * base_var + df_new * new_var) / df_run if df_run else 0.0
    spread = 1 / k + 1 / m
    v_run = max(pooled * spread, base_var / k + new_var / m, FLOOR**2 * spread)
    v_session, df_session = 0.0, math.inf
    if session_prior > 0:
        shift, df_session = _session_variance(means, base_var, k / sessions, session_prior)
        v_session = shift * (1 + 1 / sessions)
    total = v_run + v_session
    df = total**2 / (v_run**2 / max(df_run, 1e-9) + v_session**2 / df_session)
    theta = statistics.fmean(new) - statistics.fmean(means)
    return Estimate(
        theta=theta,
        se=math.sqrt(total),
        df=min(df, 1e6),
        new_runs=m,
        base_runs=k,
        sd=math.sqrt(max(pooled, FLOOR**2)),
    )


def runs_needed(e: Estimate, delta: float) -> int | None:
    """About how many new runs in all would settle a gate of log margin `delta`; None when no number of runs can."""
    room = delta - max(e.theta, 0.0)
    if room <= 0:
        return None
    inverse = (room / (2.5 * e.sd)) ** 2 - 1 / e.base_runs
    return max(e.new_runs + 1, math.ceil(1 / inverse)) if inverse > 0 else None
