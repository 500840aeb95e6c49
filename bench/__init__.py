"""Measuring what a setting does to the same load. Nothing lives here yet; README.md says what will."""
