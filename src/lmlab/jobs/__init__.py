"""Running a point: in one process or on several ranks, a point in, a result out."""
