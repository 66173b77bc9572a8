"""To be written."""

TITLE = "machine"
