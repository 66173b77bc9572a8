"""To be written."""

TITLE = "profile"
