"""From results to the report: front page, chapters, index and figures, in one job."""
