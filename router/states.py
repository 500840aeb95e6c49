"""The states of one process, one a deployment: shared by the ingress's code and Serve's router."""

from __future__ import annotations

import threading

from router.state import RouterState

_states: dict[tuple[str, str], RouterState] = {}
_states_lock = threading.Lock()


def state_for(app_name: str, deployment_name: str) -> RouterState:
    """This process's state for a deployment: the same object for the ingress's code and for Serve's router."""
    with _states_lock:
        key = (app_name, deployment_name)
        if key not in _states:
            _states[key] = RouterState()
        return _states[key]
