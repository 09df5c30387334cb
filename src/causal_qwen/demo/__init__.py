"""The demonstration: the whole story on the embedded base, and a report that opens without a server."""
