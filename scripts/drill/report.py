"""The report of the drill, in Markdown."""

from collections.abc import Sequence

from scripts.drill.load import Caller
from scripts.drill.phases import Phase, quantiles

# A server's smallest share of the calls if the balance is restored: a quarter less than a third.
MIN_SHARE = 0.25


def table(callers: Sequence[Caller], phases: Sequence[Phase]) -> str:
    """One line for each phase and caller; times in milliseconds."""
    lines = [
        "| phase | s | client | calls | failed | median ms | p99 ms | longest ms | shares | back after s |",
        "|---|---:|---|---:|---:|---:|---:|---:|---|---:|",
    ]
    for phase in phases:
        shares = " ".join(f"{share:.0%}" for share in phase.shares.values())
        back = "" if phase.returned_seconds is None else f"{phase.returned_seconds:.1f}"
        for caller in callers:
            count, failed, median, high, longest = quantiles(caller, phase)
            figures = f"{count} | {failed} | {median:.1f} | {high:.1f} | {longest:.0f}"
            seconds = phase.end - phase.begin
            lines.append(f"| {phase.name} | {seconds:.0f} | {caller.name} | {figures} | {shares} | {back} |")
    return "\n".join(lines)


def problems(callers: Sequence[Caller], phases: Sequence[Phase]) -> list[str]:
    """What must not be: failed calls, and servers with less than their share."""
    found = []
    for caller in callers:
        failed = [call.error for call in caller.calls if call.error]
        if failed:
            found.append(f"{caller.name}: {len(failed)} of {len(caller.calls)} calls failed: {failed[0]}")
        if not caller.calls:
            found.append(f"{caller.name}: no call was made")
    found += [
        f"{phase.name}: {name} answered {share:.0%} of the calls, less than {MIN_SHARE:.0%}"
        for phase in phases
        for name, share in phase.shares.items()
        if share < MIN_SHARE
    ]
    return found
