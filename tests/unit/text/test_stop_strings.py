from __future__ import annotations

import pytest

from replica.text.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str]) -> list[tuple[str, str | None]]:
    watcher = StopStrings(stops)
    return [watcher.feed(piece) for piece in pieces]


def test_a_stop_over_several_pieces_shows_nothing_of_itself() -> None:
    assert run(["own fox"], ["the br", "own", " f", "ox jumps"]) == [
        ("the br", None),
        ("", None),
        ("", None),
        ("", "own fox"),
    ]


def test_what_only_looked_like_a_stop_is_sent_as_soon_as_it_differs() -> None:
    assert run(["own fox"], ["br", "own f", "rog"]) == [("br", None), ("", None), ("own frog", None)]


def test_only_what_may_begin_a_stop_is_held() -> None:
    assert run(["aab"], ["xaaa", "c"]) == [("xa", None), ("aac", None)]


def test_a_stop_may_begin_and_end_within_one_piece() -> None:
    assert run(["b"], ["abc"]) == [("a", "b")]
    assert run(["a"], ["abc"]) == [("", "a")]


def test_of_two_stops_the_one_that_ends_first_wins() -> None:
    assert run(["own fox", "own"], ["brown fox"]) == [("br", "own")]
    assert run(["bcde", "cd"], ["abcdef"]) == [("ab", "cd")]


def test_of_stops_that_end_together_the_longest_wins() -> None:
    assert run(["cd", "bcd"], ["abcd"]) == [("a", "bcd")]


def test_a_stop_that_never_comes_changes_nothing() -> None:
    watcher = StopStrings(["zz"])
    assert watcher.feed("hello z") == ("hello ", None)
    assert watcher.flush() == "z"


def test_after_a_match_nothing_more_comes() -> None:
    watcher = StopStrings(["b"])
    assert watcher.feed("ab") == ("a", "b")
    assert watcher.feed("cd") == ("", "b")
    assert watcher.flush() == ""


def test_no_stops_pass_everything() -> None:
    assert run([], ["abc"]) == [("abc", None)]


def test_an_empty_stop_is_our_own_bug() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])
