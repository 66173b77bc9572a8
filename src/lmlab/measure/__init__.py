"""How things are measured: clocks, statistics, the machine. Importing this imports no torch."""
