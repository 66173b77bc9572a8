"""The study as data: typed configuration, points to measure, where each result lives. No torch."""
