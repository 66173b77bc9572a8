"""Back-of-the-envelope models of training at scale: memory, batch sizes, collectives. No torch."""
