"""To be written."""

TITLE = "attention"
