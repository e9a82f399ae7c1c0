"""The embedded fleet: real engine processes and a frontend, and the story told with them."""
