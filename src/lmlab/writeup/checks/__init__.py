"""One module a chapter: `checks(collected)` gives warnings where numbers contradict each other.

A number can be wrong without looking wrong. Two tables that should agree, a part larger than its
whole, a rate above the hardware's peak: each is tested before the page is written, and what fails
is printed in the page, above the tables concerned.
"""
