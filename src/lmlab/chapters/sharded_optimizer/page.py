"""To be written."""

TITLE = "sharded_optimizer"
