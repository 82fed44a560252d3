"""The stream's grammar and the rules: no I/O, no async, nothing but msgspec."""
