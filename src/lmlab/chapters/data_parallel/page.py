"""To be written."""

TITLE = "data_parallel"
