"""One module a chapter: `findings(collected)` gives its sentences by name, chosen by the data.

Each sentence is one function of a frame. It names the numbers it rests on, has a branch for the
data saying the opposite, and says so when its data is missing. `summary` goes into the abstract.
"""
