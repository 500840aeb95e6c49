"""Which running sequence should give its KV blocks back when none is free: the candidates, measured."""
