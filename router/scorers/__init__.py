"""Scorers: one idea a file, all in [0, 1], 1 is best. A new one: a file here, a table test, ten lines in the README."""
