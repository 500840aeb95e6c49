"""Stop strings, matched in the text of the output while it streams.

Every stop is followed by its own Knuth-Morris-Pratt automaton: its state is how much of the stop the text so far ends
with. The longest such beginning is all that must be held back, and each character is looked at once per stop. The
match that ends first wins, the longest of those that end together; so the result doesn't depend on how the text is
cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Watches one sequence's output for `stops` (none empty). The prompt is never fed, so it can't match.

    The caller honours `min_tokens` by not feeding text of earlier tokens (and sending it as it is).
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that may be sent now, the stop that matched or None). Nothing of the stop is ever in the text.

        After a match everything further is dropped.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        matches = [(end, -len(stop.word), stop.word) for stop in self._stops if (end := stop.advance(text)) is not None]
        seen = self._held + text
        if matches:
            end, _, self.matched = min(matches)
            seen = seen[: len(self._held) + end - len(self.matched)]
            self._held = ""
            return seen, self.matched
        certain = len(seen) - max(stop.state for stop in self._stops)
        self._held = seen[certain:]
        return seen[:certain], None

    def flush(self) -> str:
        """The text held back, at the end of a sequence in which no stop was completed."""
        rest, self._held = self._held, ""
        return rest


class _Automaton:
    """`state`: length of the longest beginning of `word` that the text so far ends with."""

    def __init__(self, word: str) -> None:
        if not word:
            raise ValueError("a stop string can't be empty")
        self.word = word
        self.state = 0
        self._fallback = [0] * len(word)
        length = 0
        for i in range(1, len(word)):
            while length and word[i] != word[length]:
                length = self._fallback[length - 1]
            length += word[i] == word[length]
            self._fallback[i] = length

    def advance(self, text: str) -> int | None:
        """Read `text`; the number of its characters up to the end of the first match, None without one."""
        if not self.state and self.word[0] not in text:
            return None
        for i, char in enumerate(text):
            while self.state and char != self.word[self.state]:
                self.state = self._fallback[self.state - 1]
            self.state += char == self.word[self.state]
            if self.state == len(self.word):
                return i + 1
        return None
