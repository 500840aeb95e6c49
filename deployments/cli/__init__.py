"""The program `brimful`: serve, chat, status, models, dashboards. Loads no torch, and Ray only where it is started."""

from __future__ import annotations


def main() -> None:
    """Entry of the console script. Exits with the command's code; errors are one line on stderr."""
    try:
        from deployments.cli.commands import run

        code = run()
    except KeyboardInterrupt:  # while modules load
        code = 130
    raise SystemExit(code)
