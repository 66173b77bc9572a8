"""To be written."""

TITLE = "precision"
