"""Six principles of fast GPU code, one module each.

A principle is a pair of small programs that differ in that one thing.
"""

from functools import partial

from lmlab.chapters.topics import measure_topic

measure = partial(measure_topic, __name__)
