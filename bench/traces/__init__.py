"""Request lists with the lengths, arrivals and shared prefixes of published workloads."""
