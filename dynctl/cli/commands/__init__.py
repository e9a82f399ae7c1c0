"""One file a command (or group): parse, call, emit. No rendering, no client library here."""
