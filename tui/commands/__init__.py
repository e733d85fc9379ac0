"""The commands, one module per group. Each is thin: read flags, call a port, print."""
