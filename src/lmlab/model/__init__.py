"""The language model that is measured, its optimizer and loss, and a model of their cost."""
