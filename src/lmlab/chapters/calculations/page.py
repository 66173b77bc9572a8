"""To be written."""

TITLE = "calculations"
