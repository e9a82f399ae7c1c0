"""The web page of a frontend, a router or an observer: ``GET /ui``."""
