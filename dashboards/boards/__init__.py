"""One module a board: which panels, in which order, and what a reader concludes from them."""
