"""To be written."""

TITLE = "memory"
