"""Step costs: measured on the real engine, fitted, and validated against loads that the fit never saw."""
