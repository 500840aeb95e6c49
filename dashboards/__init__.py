"""Prebuilt Grafana boards and Prometheus alerts, generated from the metric tables, and how they are published."""
