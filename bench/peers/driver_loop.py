"""What every driver does around its own work: orders in, answers out, one JSON document a line on the standard pipes.

Standard library only. Whatever a library prints goes to stderr, so that nothing gets among the answers. The driver ends
when its orders end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(load: Callable[[], tuple[str, Answer]]) -> None:
    """`load` gives the version of what is driven, told as {"ready": version}, and who answers each order. An exception
    becomes {"error": text} and ends the process."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")

    try:
        version, answer = load()
        tell({"ready": version})
        for line in sys.stdin:
            tell(answer(json.loads(line)))
    except Exception as error:
        tell({"error": f"{type(error).__name__}: {error}"})
        raise
