"""One module a chapter: `figures(collected)` gives its drawings by name."""
