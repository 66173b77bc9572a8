"""Training at scale on paper: memory, batches and messages from formulas. No torch, no device."""
