"""Six principles of fast GPU code, one module each.

Each is shown by a pair of small programs, one that follows it and one that does not.
"""

from functools import partial

from lmlab.chapters.topics import measure_topic

measure = partial(measure_topic, __name__)
