"""Results into tables, figures, findings and pages. No torch."""
