"""Sets of results compared: two revisions, two machines, two studies."""
