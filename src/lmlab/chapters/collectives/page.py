"""To be written."""

TITLE = "collectives"
