"""`python -m deployments.cli` is `brimful`."""

from deployments.cli import main

main()
