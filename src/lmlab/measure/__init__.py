"""How things are measured: clocks, statistics, the machine. Does not import torch."""
