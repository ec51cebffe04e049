"""The command line: a file a command, each parsing, asking the library once, and showing it."""
