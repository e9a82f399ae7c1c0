"""The dashboard: its sources, its pure parts, and the app on screens of text."""
