"""Types and parsers of the values of config fields: host entries, intervals, and strings that are checked."""
