"""What one step of scheduling costs, ours beside a peer's, and what a waiting request weighs."""
