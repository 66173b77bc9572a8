"""To be written."""

TITLE = "fsdp"
