"""Prepares models in a process of their own, so that the program at the terminal never loads torch."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from deployments.config import ModelSettings
from replica.errors import ModelNotFound
from replica.model.api import ERROR_PREFIX
from replica.model_card import ModelCard

GRACE_S = 5.0


async def prepare_model(settings: ModelSettings, temporary: Path, progress: Callable[[str], None]) -> ModelCard:
    """Run `replica.model.prepare`; its lines go to `progress`. Cancelled: the process is ended too.

    Its temporary files go to the folder `temporary`, which the caller removes (torch leaves some).
    Raises `ModelNotFound` with the line of its error, or else its last line; the error is no progress.
    """
    arguments = ["--model", settings.model]
    for flag, value in (("revision", settings.revision), ("download-dir", settings.download_dir)):
        if value is not None:
            arguments += [f"--{flag}", value]
    if settings.chat_template is not None:
        arguments += ["--chat-template", settings.chat_template]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "replica.model.prepare", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    output = asyncio.ensure_future(process.stdout.read())
    last = ""
    try:
        async for line in process.stderr:
            text = line.decode(errors="replace").strip()
            last = text.removeprefix(ERROR_PREFIX) or last
            if text and not text.startswith(ERROR_PREFIX):
                progress(text)
        code = await process.wait()
        card = (await output).decode()
    finally:
        output.cancel()
        await _end(process)
    if code:
        raise ModelNotFound(last or f"preparing {settings.model} failed with exit code {code}")
    return ModelCard.from_json(card.splitlines()[-1])


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and SIGKILL after `GRACE_S`: a model is put in its place by one rename, so both are safe."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), GRACE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
