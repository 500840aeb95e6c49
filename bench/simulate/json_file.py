"""JSON files that people give and take: read with care, and written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MAX_BYTES = 50_000_000


def read_json(path: Path) -> Any:
    """What a file holds. Raises `ValueError`, with a reason for people, for whatever is no file of JSON."""
    try:
        if not path.is_file():
            raise ValueError("no such file" if not path.exists() else "it is no file")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES:,} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise ValueError("it is no text") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None


def write_whole(path: Path, text: str) -> None:
    """Raises `OSError`; then a file that was there is as it was. What is no regular file is written to as it is."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
