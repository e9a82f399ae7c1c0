"""The documentation, run: every command as written, every shown output and number as it is."""
