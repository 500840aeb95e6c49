"""Errors that cross a process border, also those that Ray pickles, arrive as what they were."""

from __future__ import annotations

import pickle

import pytest

from replica.errors import BrimfulError, QueueFull, SettingError


@pytest.mark.parametrize(
    "error",
    [
        SettingError("max_num_seqs", 0, "1 or more"),
        QueueFull("full", retry_after_s=2.0),
        BrimfulError("broken", param="prompt"),
    ],
)
def test_an_error_survives_pickling(error: BrimfulError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.info(), str(copy)) == (type(error), error.info(), str(error))
