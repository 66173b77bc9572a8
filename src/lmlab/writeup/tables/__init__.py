"""One module a chapter: `tables(collected)` gives its tables by name."""
