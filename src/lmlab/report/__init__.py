"""The report engine: results in, tables, figures, comparisons and pages out. Knows no chapter."""
