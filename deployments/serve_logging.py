"""Lets our modules' log lines appear in the log files of the Serve replica that runs them."""

from __future__ import annotations

import logging

PACKAGES = ("deployments", "replica", "router")


def log_through_serve() -> None:
    """Call it in a deployment's constructor: Serve has set up its own logger by then."""
    serve_logger = logging.getLogger("ray.serve")
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = list(serve_logger.handlers)
        logger.setLevel(serve_logger.getEffectiveLevel())
        logger.propagate = False
