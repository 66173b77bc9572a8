"""One module a chapter: a point in, a result out."""
