"""The language model that is measured, its optimizer and loss, and what they should cost."""
