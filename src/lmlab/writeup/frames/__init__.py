"""Results as tidy frames, one module a chapter: what tables, figures, findings and checks share."""
