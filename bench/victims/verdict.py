"""Whether some rule deserves to replace `newest`, and the study's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bench.victims.study import Measured

REFERENCE = "newest"
"""What is shipped."""

LESS = 0.98
"""A rule must recompute at least 2 % less under every load: below that it's chance."""
LONGER, SLACK_S = 1.1, 1.0
"""What the longest wait and the longest stall in a run may be longer: either is one request's luck. A second is about
what one preemption costs; below it nobody starves."""
OFTEN = 0.01
"""Share of requests that may be preempted more than 3 times beyond those of the reference: a sequence is spared only
while another victim exists, and in a small batch there is none at times."""

Case = tuple[str, float]
"""Shape and share of capacity."""


def better_rules(measured: Mapping[Case, Mapping[str, Measured]]) -> list[str]:
    """Rules that recompute less than the reference under every load and starve nobody: hardly anyone preempted more
    than 3 times, longest wait and longest stall hardly longer, throughput not below. Best first."""
    rules = set.intersection(*(set(rows) for rows in measured.values())) - {REFERENCE}
    good = [rule for rule in rules if all(_beats(rows[rule], rows[REFERENCE]) for rows in measured.values())]
    return sorted(good, key=lambda rule: sum(rows[rule].recomputed_tokens for rows in measured.values()))


def _beats(rule: Measured, reference: Measured) -> bool:
    return (
        rule.recomputed_tokens < LESS * reference.recomputed_tokens
        and rule.num_over_3 <= reference.num_over_3 + OFTEN * reference.num_requests
        and _not_longer(rule.longest_wait_s, reference.longest_wait_s)
        and _not_longer(rule.longest_stall_s, reference.longest_stall_s)
        and rule.throughput >= reference.throughput * 0.995
    )


def _not_longer(seconds: float, reference_s: float) -> bool:
    return seconds <= max(LONGER * reference_s, reference_s + SLACK_S)


def table(rows: Mapping[str, Measured]) -> Iterator[str]:
    """One line a rule. Seconds; tokens in thousands."""
    yield (
        f"{'rule':<26}{'again k':>9}{'comp/use':>9}{'preempt':>8}{'max':>4}{'>3':>5}{'req/s':>8}"
        f"{'ttft99':>8}{'e2e99':>8}{'itl99':>7}{'wait':>7}{'stall':>7}"
    )
    for row in rows.values():
        yield (
            f"{row.rule:<26}{row.recomputed_tokens / 1e3:>9.1f}{row.computed_per_useful:>9.4f}"
            f"{row.mean_preemptions:>8.3f}{row.max_preemptions:>4}{row.num_over_3:>5.1f}{row.throughput:>8.3f}"
            f"{row.ttft_p99_s:>8.1f}{row.e2e_p99_s:>8.1f}{row.itl_p99_s:>7.2f}{row.longest_wait_s:>7.1f}{row.longest_stall_s:>7.1f}"
        )
